"""Four ways to write the same task; `test_verifiers.py` adds the fifth."""

import five_ways


def test_reward_function_gym_agent_and_openai_client_have_the_same_tokens_masks_and_rewards(tokenizer, interpreter):
    five_ways.assert_equal(five_ways.run(tokenizer, five_ways.ways(interpreter)))
