"""The files that the configuration of the demo refers to."""

from pathlib import Path

from tidemill_trainer.demo.task import CHARACTERS, addition_rows, write_jsonl

NUM_DIGITS = 2
NUM_TRAIN = 8192
NUM_VAL = 512
ABOUT = "The digits of a sum are written from right to left, as in addition by hand: the answer to 47+85= is 231."


def write_assets(folder: Path, seed: int = 0) -> list[str]:
    """Write `model/`, `train.jsonl`, `val.jsonl` and, for the report, `about.txt` to `folder`.

    Returns:
        `key=value` overrides with the paths of these files.
    """
    from tidemill_trainer.demo.model import write_model  # transformers takes seconds to import

    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", CHARACTERS, max_length=64, seed=seed)
    train, val = addition_rows(NUM_DIGITS, NUM_TRAIN, NUM_VAL, seed)
    write_jsonl(folder / "train.jsonl", train)
    write_jsonl(folder / "val.jsonl", val)
    (folder / "about.txt").write_text(ABOUT)
    return [
        f"model.path={folder / 'model'}",
        f'data.train_files=["{folder / "train.jsonl"}"]',
        f'data.val_files=["{folder / "val.jsonl"}"]',
    ]
