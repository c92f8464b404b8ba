"""Task 1.3: what was held back is lost"""

from __future__ import annotations


class StopStrings:
    def __init__(self, stops: Sequence[str]):
        self.stops = stops
        self.held = ""  # may be the beginning of a stop string
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self.held + text
        found = [(start + len(stop), start) for stop in self.stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)[1]]
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        keep = next((n for n in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        self.held = ""
        return ""

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self.stops)
