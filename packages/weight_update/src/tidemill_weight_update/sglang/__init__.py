"""Engine clients for stock SGLang. Importing this does not import sglang."""

from tidemill_weight_update.sglang.http import HttpEngine
from tidemill_weight_update.sglang.local import LocalEngine
from tidemill_weight_update.sglang.payload import sglang_launch_args

__all__ = ["HttpEngine", "LocalEngine", "sglang_launch_args"]
