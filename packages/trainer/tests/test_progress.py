import pytest


@pytest.mark.parametrize(("mfu", "shown"), [({"perf/mfu/actor": 0.4567}, "45.7%"), ({}, "")])
def test_step_line_aligns_speed_with_the_header(mfu, shown, progress, terminal):
    speed = {"perf/total_num_tokens": 3000.0, "perf/tokens_per_s/actor": 12345.6}
    progress.step("rl", {"step": 3, "timing_s/step": 1.5} | speed | mfu, None)
    header, line = terminal.getvalue().splitlines()
    for title, value in (("s/step", "1.50"), ("tok/s", "2000"), ("MFU", shown)):
        end = header.index(title) + len(title)
        assert line[:end].endswith(value or " ")


def test_steps_of_fine_tuning_are_shown_if_validated_or_two_seconds_apart(progress, terminal):
    timing = {"timing_s/step": 0.1}
    progress.sft_step(0, {"val/loss": 3.0})
    for step in (1, 2):
        progress.sft_step(step, {"train/loss": 2.5, "train/epoch": 0.5} | timing)
    progress.sft_step(3, {"train/loss": 2.0, "train/epoch": 1.0, "val/loss": 2.25} | timing)
    header, *lines = terminal.getvalue().splitlines()
    assert [line.split()[2] for line in lines] == ["0", "3"]
    assert lines[1][: header.index("val loss") + len("val loss")].endswith("2.0000    2.2500")
