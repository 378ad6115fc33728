"""State that outlives a request: one Protocol (`unisono.core.state.Store`), an embedded engine and a shared one."""
