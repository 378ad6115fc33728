// Chats of this tab, in its session storage: they survive a reload, and are removed when the user signs out.

const KEPT = "unisono.chats";
const MOST_CHATS = 20;
const MOST_CHARACTERS = 2_000_000;

let all = read();

function read() {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

export function chats() {
  return all;
}

export function newChat(settings = []) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()), title: "", lanes: settings.map((one) => ({ settings: one, turns: [] })) };
}

export function keepChat(chat) {
  const first = chat.lanes[0]?.turns.find(({ turn }) => turn.kind === "user");
  chat.title = (first?.turn.text.trim().replaceAll(/\s+/g, " ") || "Chat").slice(0, 60);
  all = [structuredClone(chat), ...all.filter(({ id }) => id !== chat.id)].slice(0, MOST_CHATS);
  try {
    for (;;) {
      const text = JSON.stringify(all);
      if (text.length <= MOST_CHARACTERS || all.length === 1) {
        sessionStorage.setItem(KEPT, text);
        return;
      }
      all.pop();
    }
  } catch {
    // Storage failed: the chats exist until the page is closed.
  }
}
