"""Pack the rows of a micro-batch into one sequence without padding."""

import torch
import torch.nn.functional as F
from tidemill_dataproto import DataProto, ragged

from tidemill_engines.batch.topk_request import topk_request
from tidemill_engines.distributed.device import to_device
from tidemill_engines.model_io import ModelInputs, PackedLayout, VisionInputs


def response_positions(input_lengths: torch.Tensor, response_lengths: torch.Tensor) -> torch.Tensor:
    """Return the indices [M] of the response tokens in the packed input of rows [B] that end with their responses."""
    ends = input_lengths.cumsum(0)
    shift = ends - response_lengths.cumsum(0)
    return torch.arange(int(response_lengths.sum())) + shift.repeat_interleave(response_lengths)


def pack_rows(
    micro_batch: DataProto,
    device: torch.device,
    *,
    share: int = 0,
    num_shares: int = 1,
    vision: VisionInputs | None = None,
) -> ModelInputs:
    """Pack the columns `input_ids` and `responses` of a checked batch (on the CPU) for a model on `device`.

    A batch without tokens becomes one token without a prediction, so its rank still runs the model and takes part in
    every collective. For the same reason a row of up to `num_shares - 1` tokens without predictions is added if the
    packed tokens cannot be divided otherwise.

    Args:
        share: index of this rank's part among the `num_shares` equal parts of the packed tokens. Labels are taken from
            the whole rows, so the last token of a part has its label.
        vision: images and videos for a vision-language model.
    """
    tokens, responses = micro_batch["input_ids"], micro_batch["responses"]
    lengths, input_ids = ragged.lengths(tokens), ragged.values(tokens).long()
    targets = response_positions(lengths, ragged.lengths(responses))
    labels, predictors = input_ids[targets], targets - 1
    placeholders = input_ids.new_tensor([] if vision is None else vision.placeholders)
    input_ids = torch.cat([input_ids, placeholders])
    filling = -len(input_ids) % num_shares if len(input_ids) else num_shares
    lengths = torch.cat([lengths, lengths.new_tensor([len(placeholders), filling])])
    lengths = lengths[lengths > 0]  # attention kernels do not support empty rows
    input_ids = F.pad(input_ids, (0, filling))
    starts = F.pad(lengths.cumsum(0), (1, 0))[:-1]
    position_ids = (torch.arange(len(input_ids)) - starts.repeat_interleave(lengths)).unsqueeze(0)
    if vision is not None:
        spatial = F.pad(vision.positions, (0, 0, 0, filling))
        position_ids = torch.cat([position_ids, spatial.T]).unsqueeze(1)
    size = len(input_ids) // num_shares
    run = slice(share * size, (share + 1) * size)
    first, end = torch.searchsorted(predictors, torch.tensor([run.start, run.stop])).tolist()

    all_input_ids = to_device(input_ids.unsqueeze(0), device)
    return ModelInputs(
        input_ids=all_input_ids[:, run],
        position_ids=to_device(position_ids[..., run], device),
        layout=PackedLayout.from_lengths(lengths, device),
        predictors=to_device(predictors[first:end] - run.start, device),
        labels=to_device(labels[first:end], device),
        topk=topk_request(micro_batch, slice(first, end), device),
        temperature=float(micro_batch.meta_info.get("temperature", 1.0)),
        first_output=first,
        num_outputs=len(labels),
        vision={} if vision is None else {name: to_device(each, device) for name, each in vision.tensors.items()},
        all_input_ids=all_input_ids,
    )
