from tidemill_engines.checkpoint.host_memory import available_bytes

GIB = 1 << 30


def files(folder, maximum):
    (folder / "meminfo").write_text("MemTotal:       33554432 kB\nMemAvailable:   20971520 kB\n")
    (folder / "memory.max").write_text(f"{maximum}\n")
    (folder / "memory.current").write_text(f"{10 * GIB}\n")
    (folder / "memory.stat").write_text(f"anon {2 * GIB}\ninactive_file {7 * GIB}\n")
    return folder / "meminfo", folder


def test_limit_of_a_container_bounds_the_available_memory(tmp_path):
    assert available_bytes(*files(tmp_path, maximum=16 * GIB)) == 13 * GIB  # files that can be dropped count as free
    assert available_bytes(*files(tmp_path, maximum=64 * GIB)) == 20 * GIB
    assert available_bytes(*files(tmp_path, maximum="max")) == 20 * GIB
    assert available_bytes(tmp_path / "meminfo", tmp_path / "without cgroup v2") == 20 * GIB


def test_memory_is_available_here():
    assert available_bytes() > 0
