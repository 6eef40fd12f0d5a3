"""The batch container: dense, ragged and object columns of one batch."""

from tidemill_dataproto import ragged
from tidemill_dataproto.proto import DataProto

__all__ = ["DataProto", "ragged"]
