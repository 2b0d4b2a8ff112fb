"""A store that is far away: its answers take a while, and bytes go over a link of a given speed. Kept by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from composer_nb.diloco.store.folder import Store


class SlowStore:
    """A store whose every operation takes `latency_s` seconds more, and its bytes what a link of `mbit` megabits a
    second (0: any speed) takes for them. What the store underneath cannot do, this one cannot either."""

    def __init__(self, store: Store, *, latency_s: float = 0.0, mbit: float = 0.0) -> None:
        self.store, self.latency_s, self.mbit = store, latency_s, mbit

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self.store, name)

        def asked(*arguments: Any) -> Any:
            answer = call(*arguments)
            moved = sum(len(part) for part in (*arguments, answer) if isinstance(part, bytes))
            time.sleep(self.latency_s + (8e-6 * moved / self.mbit if self.mbit else 0.0))
            return answer

        return asked
