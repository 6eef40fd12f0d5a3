"""sft_loss, and the counts that it divides by."""

import pytest
import torch
from tidemill_dataproto import DataProto, ragged
from tidemill_engines.batch.micro_batches import count_trained
from tidemill_engines.loss.contract import Normalizer
from tidemill_engines.loss.sft import sft_loss
from tidemill_engines.model_io import ModelOutput, ValueOutput


def test_count_trained_and_sft_loss():
    responses = ragged.ragged(torch.arange(6), [3, 1, 0, 2])
    for dtype in (torch.bool, torch.float32, torch.int64):
        mask = ragged.like(torch.tensor([1, 0, 1, 0, 1, 1]).to(dtype), responses)
        batch = DataProto.from_dict({"responses": responses, "response_mask": mask})
        assert count_trained(batch) == (4.0, 2.0)
        output = ModelOutput(log_probs=torch.tensor([-1.0, -9.0, -2.0, -9.0, -3.0, -4.0]))
        loss, metrics = sft_loss(output, batch, Normalizer(num_tokens=4.0, num_sequences=2.0))
        assert loss.item() == 2.5
        assert metrics == {}
        with pytest.raises(TypeError, match="requires the ModelOutput of a language model; got a ValueOutput"):
            sft_loss(ValueOutput(values=output.log_probs), batch, Normalizer(num_tokens=4.0, num_sequences=2.0))
