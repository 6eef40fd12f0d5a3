from tidemill_trainer.demo.addition import addition_row, addition_rows


def test_ground_truths_are_sums_from_right_to_left():
    row = addition_row(47, 85, 2)
    assert (row["prompt"], row["ground_truth"]) == ("47+85=", "231")
    for row in addition_rows(2, 50, 10, seed=1)[0]:
        a, b = row["prompt"].rstrip("=").split("+")
        assert int(row["ground_truth"][::-1]) == int(a) + int(b)


def test_training_and_validation_problems_are_disjoint():
    train, val = addition_rows(2, 9000, 1000, seed=0)
    prompts = [row["prompt"] for row in [*train, *val]]
    assert len(set(prompts)) == 10000
