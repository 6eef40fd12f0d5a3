from tidemill_trainer.demo.model import character_tokenizer
from tidemill_trainer.demo.task import CHARACTERS


def test_tokenizer_round_trips_through_disk(tmp_path):
    from transformers import AutoTokenizer

    character_tokenizer(CHARACTERS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("12+34=", add_special_tokens=False)
    assert len(ids) == 6
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "12+34="
