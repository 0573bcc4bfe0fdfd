"""A client in a process of its own, over a slow link, to be killed: says what it does, line by line."""

import sys
from pathlib import Path

from one_shot_world import give

from potluck.split.listener import SplitListener
from potluck.split.traffic import Traffic


class Saying(SplitListener):
    def tell(self, text: str) -> None:
        print(text, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        print(what, done, total, flush=True)


if __name__ == "__main__":
    invite, home, name, data, model, mbit = sys.argv[1:]
    options = {"traffic": Traffic(float(mbit)), "listener": Saying(), "patience_s": 60.0}
    print("done", give(invite, Path(home), name, Path(data), model=model, **options).contribution, flush=True)
