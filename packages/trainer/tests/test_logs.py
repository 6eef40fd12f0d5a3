import os
import tracemalloc

from tidemill_trainer.logs import tail


def test_last_lines_of_a_log_of_gigabytes_are_read_alone(tmp_path):
    log = tmp_path / "episodes_0.log"
    log.touch()
    os.truncate(log, 4 << 30)  # without blocks on the disk
    with log.open("ab") as file:
        file.write("\none\ntwö\n".encode())
    tracemalloc.start()
    text = tail(log, 2)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text == "one\ntwö"
    assert peak < 1 << 20
    assert tail(tmp_path / "none.log", 2) == ""
