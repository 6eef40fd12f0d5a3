"""Registration of a worker's methods."""

import pytest
from tidemill_dispatch import Dispatch, Worker, register, split_over
from tidemill_dispatch.method import registered_methods


class Base(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def first(self): ...

    @register(split_over("m"), blocking=False, timeout_s=5)
    def second(self): ...

    def plain(self): ...


class Derived(Base):
    def first(self): ...

    @register(Dispatch.RANK_ZERO)
    def second(self): ...


def test_registration_is_inherited_and_can_be_replaced():
    base, derived = registered_methods(Base), registered_methods(Derived)
    assert list(base) == ["first", "second"]
    second = base["second"]
    assert (second.mode.name, second.blocking, second.timeout_s) == ("split_over('m')", False, 5)
    assert derived["first"] == base["first"]  # an override keeps the registration
    assert derived["second"].mode is Dispatch.RANK_ZERO


def test_register_returns_the_function_itself():
    def fn(self):
        return 1

    assert register(Dispatch.ONE_TO_ALL)(fn) is fn


@pytest.mark.parametrize("mode", [lambda self: None, "ONE_TO_ALL"])
def test_register_refuses_what_is_not_a_mode(mode):
    with pytest.raises(TypeError, match=r"dispatch_mode must be a DispatchMode, got .*; write for example @register\("):
        register(mode)


def test_register_refuses_generator_functions():
    def several(self):
        yield 1

    async def several_later(self):
        yield 1

    for fn in (several, several_later):
        with pytest.raises(TypeError, match="is a generator function, which cannot be registered"):
            register(Dispatch.ONE_TO_ALL)(fn)


def undecorated_name(fn):
    def wrapper(self):
        return fn(self)

    return wrapper


class Renamed(Worker):
    @register(Dispatch.ONE_TO_ALL)
    @undecorated_name
    def decorated(self): ...

    @register(Dispatch.ONE_TO_ALL)
    def base(self): ...

    alias = base


class RenamedDerived(Renamed):
    def base(self): ...


def test_method_is_called_by_the_name_of_its_attribute():
    methods = registered_methods(RenamedDerived)
    assert {name: spec.name for name, spec in methods.items()} == {
        "decorated": "decorated",
        "base": "base",
        "alias": "alias",
    }
