import inspect

from tidemill_trainer.rollout.client import RayEngine
from tidemill_trainer.rollout.worker import RolloutWorker
from tidemill_weight_update import EngineClient


def _methods(protocol):
    return {
        name: inspect.signature(f) for name, f in vars(protocol).items() if inspect.isfunction(f) and name[0] != "_"
    }


def test_worker_and_client_implement_the_protocol_of_the_updater():
    methods = _methods(EngineClient)
    assert len(methods) >= 3
    for name, signature in methods.items():
        for cls in (RayEngine, RolloutWorker):
            assert inspect.signature(getattr(cls, name)).parameters.keys() == signature.parameters.keys(), name
