"""The form of an upload (multipart/form-data, RFC 7578), parsed as it arrives: a few short fields, and one file."""

import logging
import re
from contextlib import suppress
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers

from ktqueue.core.errors import InvalidRequest, RequestTooLarge
from ktqueue.core.units import format_bytes
from ktqueue.gateway.errors import MalformedForm, UnsupportedMediaType

FILE = "file"  # the name of the part that is the file
UNNAMED = "file"  # the name of a file that was sent without one
MAX_FILENAME_BYTES = 255
MAX_PARTS = 16
MAX_FIELD_BYTES = 1 << 10
MAX_HEADERS = 8  # of a part
MAX_HEADER_BYTES = 4 << 10
FORM_BYTES = MAX_PARTS * (MAX_HEADERS * MAX_HEADER_BYTES + MAX_FIELD_BYTES)  # most of a form without its file
_PARAMETER = re.compile(rb';\s*([^=;\s]+)\s*=\s*("(?:\\.|[^"\\])*"|[^;]*)', re.DOTALL)
_PLAIN = (b"binary", b"8bit", b"7bit")  # content-transfer-encodings that change nothing
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")

logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # it logs a line for each wrong byte of a client


def boundary_of(headers: Headers) -> bytes:
    """The boundary between the parts. Raises UnsupportedMediaType, MalformedForm if there is none."""
    content_type, encoding = headers.get("content-type", ""), headers.get("content-encoding", "identity")
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or encoding.strip().lower() not in ("", "identity"):
        wrong = ("content-type", content_type) if kind != b"multipart/form-data" else ("content-encoding", encoding)
        limit = "multipart/form-data without content-encoding"
        raise UnsupportedMediaType(
            f"an upload must be {limit}, got {wrong[0]}: {wrong[1][:80]!r}",
            param=wrong[0],
            limit=limit,
            value=wrong[1][:80],
        )
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise MalformedForm(
            "content-type must have a boundary of 1 to 70 bytes", param="content-type", limit=70, value=len(boundary)
        )
    return boundary


class UploadForm:
    """One form. `fields` and `filename` are whole after `end`."""

    def __init__(self, boundary: bytes, max_file_bytes: int) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._max_file_bytes = max_file_bytes
        self._file_bytes = 0
        self._found = bytearray()
        self._parts = 0
        self._name = ""  # of the part that is being read
        self._header, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    def feed(self, data: bytes) -> bytes:
        """Parse the next bytes of the body. Returns those that belong to the file.

        Raises MalformedForm, InvalidRequest naming the field, RequestTooLarge.
        """
        try:
            self._parser.write(data)
        except FormParserError as error:
            if "header size" in str(error):
                raise MalformedForm(
                    f"a part has a header of more than {MAX_HEADER_BYTES} bytes; give the file a shorter name",
                    param="body",
                    limit=MAX_HEADER_BYTES,
                ) from error
            raise MalformedForm(f"the body is not multipart/form-data: {error}", param="body") from error
        found, self._found = bytes(self._found), bytearray()
        return found

    def end(self) -> None:
        """Check that the body was complete. Raises MalformedForm, InvalidRequest if there was no file."""
        if not self._is_complete:
            raise MalformedForm("the body ends before its last boundary", param="body")
        if not self.filename:
            raise InvalidRequest("file must be present", param=FILE)

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise MalformedForm(
                f"an upload may have at most {MAX_PARTS} parts", param="body", limit=MAX_PARTS, value=self._parts
            )
        self._name, self._disposition = "", b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        name, value = self._header.lower(), bytes(self._value)
        if name == b"content-disposition":
            self._disposition = value
        elif name == b"content-transfer-encoding" and value.strip().lower() not in _PLAIN:
            shown = value.decode(errors="replace")[:80]
            raise MalformedForm(
                f"a part must not have a content-transfer-encoding, got {shown!r}: send its bytes as they are",
                param="body",
                value=shown,
            )
        self._header, self._value = bytearray(), bytearray()

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if not name:
            raise MalformedForm("each part must have a content-disposition with a name", param="body")
        if name in self.fields or (name == FILE and self.filename):
            raise InvalidRequest(f"{name[:80]} must be sent once, got it again", param=name[:80], limit=1, value=2)
        self._name = name
        if name == FILE:
            sent = _extended_name(self._disposition) or options.get(b"filename", b"").decode(errors="replace")
            self.filename = _plain_name(sent)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != FILE:
            self._value += data[start:end]
            if len(self._value) > MAX_FIELD_BYTES:
                raise InvalidRequest(
                    f"{self._name[:80]} must be at most {MAX_FIELD_BYTES} bytes",
                    param=self._name[:80],
                    limit=MAX_FIELD_BYTES,
                    value=len(self._value),
                )
            return
        self._found += data[start:end]
        self._file_bytes += end - start
        if self._file_bytes > self._max_file_bytes:
            raise file_too_large(self._file_bytes, self._max_file_bytes)

    def _on_part_end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode(errors="replace")
            self._value = bytearray()

    def _on_end(self) -> None:
        self._is_complete = True


def file_too_large(size: int, max_bytes: int) -> RequestTooLarge:
    """The error for a file of `size` bytes or more."""
    return RequestTooLarge(
        f"file must be at most {max_bytes} bytes ({format_bytes(max_bytes)}), got {size} or more",
        param=FILE,
        limit=max_bytes,
        value=size,
    )


def _extended_name(disposition: bytes) -> str:
    """The `filename*` of RFC 8187, which some clients send beside `filename` or alone; '' if there is none.

    RFC 7578 forbids it in forms, so the parser ignores it. Raises MalformedForm if it is not percent-encoded UTF-8.
    """
    sent = {match[1].lower(): match[2].strip(b' \t"') for match in _PARAMETER.finditer(disposition)}
    extended = next((name for name in sent if name.startswith(b"filename*")), None)
    if extended is None:
        return ""
    charset, _, rest = sent[extended].partition(b"'")
    _, quote, name = rest.partition(b"'")
    with suppress(UnicodeDecodeError):
        if extended == b"filename*" and charset.lower() == b"utf-8" and quote:
            return unquote_to_bytes(name).decode()
    shown = f"{extended.decode(errors='replace')}={sent[extended].decode(errors='replace')}"[:80]
    raise MalformedForm(
        f"a filename* must be UTF-8''NAME with percent-encoding (RFC 8187), got {shown!r}",
        param=FILE,
        limit="UTF-8",
        value=shown,
    )


def _plain_name(filename: str) -> str:
    """A client's name for a file without folders and control characters, of at most MAX_FILENAME_BYTES."""
    name = _CONTROL.sub("", re.split(r"[/\\]", filename)[-1]).strip()
    name = name.encode()[:MAX_FILENAME_BYTES].decode(errors="ignore")
    return UNNAMED if name in ("", ".", "..") else name
