"""annulus.hf: models of transformers, randomly initialised, sharded and whole."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import annulus  # noqa: E402
import annulus.hf  # noqa: E402

BATCH, LENGTH, VOCABULARY, WINDOW = 2, 40, 64, 7
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "pad_token_id": 0}
ALTERNATING = ["sliding_attention", "full_attention"]
MODELS = {
    "Llama": ("LlamaConfig", {}),  # grouped queries
    "Gemma 2": ("Gemma2Config", {"sliding_window": WINDOW, "layer_types": ALTERNATING,
                                 "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
    "Gemma 3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": ALTERNATING}),
    "gpt-oss": ("GptOssConfig", {"sliding_window": WINDOW, "layer_types": ALTERNATING,
                                 "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "Llama 4": ("Llama4TextConfig", {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 48,
                                     "num_local_experts": 2,
                                     "layer_types": ["chunked_attention", "full_attention"]}),
}
# Documents that start inside ranks, and one of one token.
LENGTHS = [11, 1, 17, LENGTH - 29]


def make_model(name, implementation, **changes):
    config, own = MODELS[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**{**COMMON, **own, **changes}),
        attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():  # attention that differs from key to key
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.train()


def make_batch(packed=False, length=LENGTH):
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCABULARY, (BATCH, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = annulus.hf.IGNORED
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        batch["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS]).repeat(BATCH, 1)
        labels[batch["position_ids"] == 0] = annulus.hf.IGNORED
    return batch


def whole_step(model, batch, lengths=(LENGTH,)):
    """Logits, loss and gradients of the unsharded model, for every document by itself."""
    count = (batch["labels"][:, 1:] != annulus.hf.IGNORED).sum()
    outputs = []
    for ids, labels in zip(batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1)):
        outputs.append(model(input_ids=ids, labels=labels, num_items_in_batch=count))
    loss = sum(output.loss for output in outputs)
    loss.backward()
    logits = torch.cat([output.logits for output in outputs], 1)
    return logits.detach(), loss.item(), gradients(model)


def sharded_step(model, batch, mesh, **keywords):
    """The same of the rank's part, with the gradients of all ranks."""
    local = annulus.hf.shard_batch(**batch, mesh=mesh, **keywords)
    logits = model(**local).logits
    loss = annulus.hf.loss(logits, local)
    loss.backward()
    annulus.hf.sum_gradients(model, mesh)
    total = loss.detach().clone()
    annulus.hf.sum_over_ranks([total], mesh)
    return logits.detach(), total.item(), gradients(model), local["annulus"].rows


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()
            if parameter.grad is not None}


def of_rows(logits, rows):
    return logits[rows[0]][:, rows[1]]


def compare(found, expected, rows=None):
    logits, loss, grads, rows = found
    torch.testing.assert_close(logits, of_rows(expected[0], rows), atol=2e-5, rtol=2e-5)
    assert loss == pytest.approx(expected[1], rel=1e-5)
    assert grads.keys() == expected[2].keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected[2][name], atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_sharded_like_unsharded(sequence, name, packed):
    whole, model = make_model(name, "eager"), make_model(name, "annulus")
    batch, lengths = make_batch(packed), LENGTHS if packed else [LENGTH]
    expected = whole_step(whole, batch, lengths)
    compare(sharded_step(model, batch, sequence), expected)
    # One step lowers the loss, and identically.
    for stepped in (whole, model):
        torch.optim.SGD(stepped.parameters(), lr=0.02).step()
        stepped.zero_grad()
    after = whole_step(whole, batch, lengths)
    assert after[1] < expected[1]
    compare(sharded_step(model, batch, sequence), after)
