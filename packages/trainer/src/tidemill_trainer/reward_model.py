"""The reward model in the training processes: one score per row."""

from tidemill_dataproto import DataProto, ragged
from tidemill_engines import BaseEngine


def score_rows(engine: BaseEngine, batch: DataProto) -> DataProto:
    """Compute the output of a value model at the last token of each row, as `rm_scores` float32 [B].

    An engine returns the value of the state before each response token, so the rows get one more token, whose value is
    that of the state after all others. Attention is causal: which token it is does not matter.

    Args:
        engine: value model.
        batch: ragged `input_ids` [B, j], at least one token per row.
    """
    ids = batch["input_ids"]
    ends = ragged.lengths(ids).cumsum(0) - 1
    end = ragged.ragged(ragged.values(ids)[ends], [1] * len(batch))
    columns = {"input_ids": ragged.concat_rows(ids, end), "responses": end}
    values = engine.infer_batch(DataProto.from_dict(columns, meta_info=dict(batch.meta_info)))["values"]
    return DataProto.from_dict({"rm_scores": ragged.values(values).float()})
