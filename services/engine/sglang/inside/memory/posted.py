"""What was posted for one room, counted where it is posted."""


class Posted:
    def __init__(self) -> None:
        self.num_pages = 0
        self.size_bytes = 0
        self.carried_bytes: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"Posted(pages={self.num_pages} bytes={self.size_bytes} carried={self.carried_bytes})"

    def pages(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages += num_pages
        self.size_bytes += num_pages * page_bytes

    def carried(self, kind: str, size_bytes: int) -> None:
        """`kind`: SGLang's word, or DRAFT."""
        self.carried_bytes[kind] = self.carried_bytes.get(kind, 0) + size_bytes
