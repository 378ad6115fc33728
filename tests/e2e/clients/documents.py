"""Files for the client suites, and what a model reads of them."""

from __future__ import annotations

from base64 import b64encode

CSV = b"tea,minutes\ngreen,2\n"
HTML = b"<title>Tea</title><p>Steep &amp; wait.</p>"
_LINE = b"BT /F1 12 Tf 72 700 Td (Green tea) Tj ET"
_OBJECTS = (
    b"<< /Type /Catalog /Pages 2 0 R >>",
    b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
    b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 5 0 R /Resources << /Font << /F1 3 0 R >> >> >>",
    b"<< /Length %d >>\nstream\n%b\nendstream" % (len(_LINE), _LINE),
)


def _pdf() -> bytes:
    """Return a PDF with one page and one line of text."""
    body, table = b"%PDF-1.4\n", b"0000000000 65535 f \n"
    for number, each in enumerate(_OBJECTS, 1):
        table += b"%010d 00000 n \n" % len(body)
        body += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    size = len(_OBJECTS) + 1
    head = b"xref\n0 %d\n%btrailer\n<< /Size %d /Root 1 0 R >>" % (size, table, size)
    return b"%b%b\nstartxref\n%d\n%%%%EOF" % (body, head, len(body))


PDF = _pdf()
BROKEN = b"%PDF-1.4 nothing"

# File name, media type, content, and a line that the model reads.
FILES = {
    "csv": ("tea.csv", "text/csv", CSV, "green,2"),
    "html": ("tea.html", "text/html", HTML, "Steep & wait."),
    "pdf": ("tea.pdf", "application/pdf", PDF, "Green tea"),
}


def base64(content: bytes) -> str:
    return b64encode(content).decode()


def data_url(media_type: str, content: bytes) -> str:
    return f"data:{media_type};base64,{base64(content)}"
