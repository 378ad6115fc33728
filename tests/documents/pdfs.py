"""PDF files for tests, written byte by byte so that they can be broken on purpose."""

from __future__ import annotations

import zlib
from io import BytesIO

from pypdf import PdfReader, PdfWriter


def page_stream(text: str) -> bytes:
    """Return the compressed content of a page with one line of text, or of an empty page."""
    return zlib.compress(f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode() if text else b"")


def pdf(*pages: str | bytes) -> bytes:
    """Return a file with a page per text, or per compressed content."""
    kids = " ".join(f"{4 + 2 * index} 0 R" for index in range(len(pages)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, page in enumerate(pages):
        content = page if isinstance(page, bytes) else page_stream(page)
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * index),
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(content), content),
        ]
    body, offsets = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    size = len(objects) + 1
    head = b"xref\n0 %d\n0000000000 65535 f \n%b" % (size, table)
    return body + head + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, len(body))


def encrypted(file: bytes, user_password: str) -> bytes:
    """Return the file with a password to open it (or ""), and one to change it."""
    writer = PdfWriter(clone_from=PdfReader(BytesIO(file)))
    writer.encrypt(user_password, "owner", algorithm="AES-256")
    written = BytesIO()
    writer.write(written)
    return written.getvalue()


def bomb(size: int = 1 << 30) -> bytes:
    """Return a file whose page expands to `size` bytes."""
    block, blocks = b" " * (1 << 20), size >> 20
    # A block that ends with a full flush can be repeated, which is faster than compressing all blocks.
    packer = zlib.compressobj(9, wbits=-zlib.MAX_WBITS)
    packed = packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = 1
    for _ in range(blocks):
        checksum = zlib.adler32(block, checksum)
    return pdf(b"\x78\xda" + packed * blocks + packer.flush() + checksum.to_bytes(4, "big"))
