import pytest
from tidemill_trainer.demo.addition import CHARACTERS
from tidemill_trainer.demo.model import piece_tokenizer


def test_tokenizer_round_trips_through_disk(tmp_path):
    from transformers import AutoTokenizer

    piece_tokenizer(CHARACTERS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("12+34=", add_special_tokens=False)
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="


@pytest.mark.parametrize(
    ("text", "pieces"),
    [("egg, eggs", ["egg", ", ", "eggs"]), ('{"a":\n(b)', ['{"', "a", '":\n(', "b", "<unk>"])],
)
def test_longest_piece_becomes_one_token(text, pieces):
    tokenizer = piece_tokenizer(["a", "b", "egg", "eggs", ", ", '{"', '":\n('])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)) == pieces
