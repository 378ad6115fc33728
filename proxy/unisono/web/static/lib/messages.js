// Returns the texts of the messages in a list of segments.

export function bodiesOf(segments) {
  const bodies = [];
  let text = null;
  const end = () => {
    if (text !== null) bodies.push(text);
    text = null;
  };
  for (const segment of segments) {
    if (segment.kind === "special") {
      end();
      if (segment.text === "<|message|>") text = "";
    } else if (segment.kind === "text" && segment.of !== "header") {
      text = (text ?? "") + segment.tokens.map(([piece]) => piece).join("");
    }
  }
  end();
  return bodies;
}
