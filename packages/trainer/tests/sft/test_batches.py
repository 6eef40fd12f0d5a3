import torch
from tidemill_dataproto import DataProto
from tidemill_trainer.sft.batches import Batches


def draw(num_examples, batch_size, num_epochs, seed=0, rows_per_example=1):
    dataset = DataProto.from_dict({"row": torch.arange(num_examples * rows_per_example)})
    batches = Batches(dataset, batch_size, seed, num_epochs=num_epochs, rows_per_example=rows_per_example)
    return [batches.batch(step)["row"].tolist() for step in range(1, batches.num_steps + 1)], batches


def test_each_epoch_has_every_example_once_and_only_the_last_batch_is_smaller():
    drawn, batches = draw(num_examples=10, batch_size=4, num_epochs=3)
    assert [len(rows) for rows in drawn] == [4] * 7 + [2]
    rows = [row for batch in drawn for row in batch]
    epochs = [rows[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [batches.epoch(step) for step in (5, 8)] == [2.0, 3.0]


def test_order_depends_on_the_seed_alone():
    assert draw(10, 4, 2)[0] == draw(10, 4, 2)[0]
    assert draw(10, 4, 2)[0] != draw(10, 4, 2, seed=1)[0]


def test_rows_of_a_pair_stay_together():
    drawn, _ = draw(num_examples=5, batch_size=2, num_epochs=1, rows_per_example=2)
    assert [len(rows) for rows in drawn] == [4, 4, 2]
    assert all(rows[1::2] == [row + 1 for row in rows[0::2]] for rows in drawn)
