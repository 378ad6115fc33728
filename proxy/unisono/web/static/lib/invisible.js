// Makes invisible characters visible in texts of models, tools and servers.

// Characters that are invisible or reverse text: controls, zero widths, directions, fillers, lone surrogates.
const NEVER = "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b\\u200e\\u200f"
  + "\\u2028-\\u202e\\u2060-\\u206f\\u3164\\ufeff\\uffa0\\ufff9-\\uffff\\ud800-\\udfff\\u{e0000}-\\u{e0fff}]";
// Joiners are valid only between the parts of an emoji and between letters of scripts that join.
const JOINED = "[\\p{scx=Arab}\\p{scx=Syrc}\\p{scx=Mong}\\p{scx=Deva}\\p{scx=Beng}\\p{scx=Guru}\\p{scx=Gujr}\\p{scx=Orya}\\p{scx=Taml}"
  + "\\p{scx=Telu}\\p{scx=Knda}\\p{scx=Mlym}\\p{scx=Sinh}\\p{scx=Khmr}\\p{scx=Mymr}]";
const JOINERS = `(?<=\\p{ExtPict}\\ufe0f?|\\p{EMod})\\u200d(?=\\p{ExtPict})|(?<=${JOINED})[\\u200c\\u200d](?=${JOINED})`;
const UNSEEN = new RegExp(`(?<kept>${JOINERS})|${NEVER}|[\\u200c\\u200d]`, "gu");
const MOST_SPELLED = 2000;

// Converts text to nodes; invisible characters are spelled out. `before` is the preceding text.
export function visible(text, before = "") {
  const made = document.createDocumentFragment();
  const whole = before + text;
  let from = before.length;
  let spelled = 0;
  for (const found of whole.matchAll(UNSEEN)) {
    if (found.index < from || found.groups.kept) continue;
    if (found.index > from) made.append(whole.slice(from, found.index));
    from = found.index + found[0].length;
    const name = `U+${found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    spelled += 1;
    if (spelled > MOST_SPELLED) made.append("\ufffd");
    else {
      const shown = document.createElement("span");
      shown.className = "control";
      shown.title = "invisible character";
      shown.textContent = name;
      made.append(shown);
    }
  }
  if (from < whole.length) made.append(whole.slice(from));
  return made;
}
