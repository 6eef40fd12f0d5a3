import doctest
import importlib
import pkgutil

import pytest
import tidemill_algorithms

MODULES = sorted(module.name for module in pkgutil.walk_packages(tidemill_algorithms.__path__, "tidemill_algorithms."))
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST


@pytest.fixture(scope="module")
def names():
    """Run the example of the package, and return the names that it defines."""
    found: dict[str, object] = {}
    (example,) = doctest.DocTestFinder(recurse=False).find(tidemill_algorithms, extraglobs=found)
    doctest.DocTestRunner(optionflags=FLAGS).run(example, clear_globs=False)
    return dict(example.globs)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_give_what_they_show(name, names):
    module = importlib.import_module(name)
    assert doctest.testmod(module, extraglobs=names, optionflags=FLAGS).failed == 0
