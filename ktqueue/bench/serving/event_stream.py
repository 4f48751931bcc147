"""The format of server-sent events, as the HTML standard defines it (section 9.2.6)."""

from collections.abc import Iterator

MAX_EVENT_BYTES = 8 << 20
_BOM = b"\xef\xbb\xbf"


class EventStream:
    """Takes the bytes of a stream in any pieces, and gives the data of each event that is complete.

    Lines end with CR, LF or both. Lines of data are joined by LF. Comments and other fields are ignored, and so is an
    event without the empty line at its end.
    """

    def __init__(self) -> None:
        self._line = bytearray()  # the beginning of a line
        self._data: list[bytes] = []  # of the event
        self._data_bytes = 0
        self._after_cr = False
        self._is_first_line = True

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the data of the events that end in this piece. Raises ValueError if an event is too long."""
        if self._after_cr and piece[:1] == b"\n":  # the second half of CR LF
            piece = piece[1:]
            self._after_cr = False
        if not piece:
            return
        self._after_cr = piece.endswith(b"\r")
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        first, *others = piece.split(b"\n")
        self._line += first
        for following in others:
            line = bytes(self._line)
            self._line[:] = following
            if self._is_first_line:
                self._is_first_line = False
                line = line.removeprefix(_BOM)
            if line:
                self._add(line)
            elif self._data:
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data = []
                self._data_bytes = 0
                yield data
        if len(self._line) + self._data_bytes > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES:,} bytes")

    def _add(self, line: bytes) -> None:
        """Add a line of an event."""
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value[1:] if value[:1] == b" " else value)
            self._data_bytes += len(line)
