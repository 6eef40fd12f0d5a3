import pytest


@pytest.mark.parametrize(("mfu", "shown"), [({"perf/mfu/actor": 0.4567}, "45.7%"), ({}, "")])
def test_step_line_aligns_speed_with_the_header(mfu, shown, progress, terminal):
    progress.step("rl", {"step": 3, "timing_s/step": 1.5, "perf/tokens_per_s/actor": 12345.6} | mfu, None)
    header, line = terminal.getvalue().splitlines()
    for title, value in (("s/step", "1.50"), ("tok/s", "12346"), ("MFU", shown)):
        end = header.index(title) + len(title)
        assert line[:end].endswith(value or " ")
