"""Interventions in a generation: forced calls, required forms, regeneration, stops."""
