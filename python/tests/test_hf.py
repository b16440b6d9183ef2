"""annulus.hf: models of transformers, randomly initialised, sharded and whole."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import annulus  # noqa: E402
import annulus.hf  # noqa: E402
from conftest import refused  # noqa: E402

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


def test_packed_documents_by_every_sign(sequence):
    """cu_seq_lens and seq_idx say what position_ids say; batches may differ."""
    model = make_model("Gemma 2", "annulus")
    batch = make_batch(packed=True)
    with torch.no_grad():
        expected = model(**annulus.hf.shard_batch(**batch, mesh=sequence)).logits
        sums = np.cumsum([0, *LENGTHS])
        flat = torch.tensor([*sums, *(sums[1:] + LENGTH)], dtype=torch.int32)
        ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
        for sign in ({"cu_seq_lens_q": flat, "cu_seq_lens_k": flat, "max_length_q": max(LENGTHS)},
                     {"seq_idx": ids.repeat(BATCH, 1)}):
            found = model(**annulus.hf.shard_batch(batch["input_ids"], mesh=sequence, **sign)).logits
            torch.testing.assert_close(found, expected)
        # The second batch is one document.
        ids = torch.stack([ids, torch.zeros_like(ids)])
        local = annulus.hf.shard_batch(batch["input_ids"], mesh=sequence, seq_idx=ids)
        found = model(**local).logits
        plain = model(**annulus.hf.shard_batch(batch["input_ids"], mesh=sequence)).logits
        torch.testing.assert_close(found[0], expected[0])
        torch.testing.assert_close(found[1], plain[1])


def test_padding_and_uneven_shards(sequence):
    whole, model = make_model("Mistral", "eager"), make_model("Mistral", "annulus")
    batch = make_batch(length=37)
    seen = torch.ones(BATCH, 37, dtype=torch.long)
    seen[0, :5] = 0
    seen[1, 30:] = 0
    with torch.no_grad():
        expected = whole(batch["input_ids"], attention_mask=seen, use_cache=False).logits
        local = annulus.hf.shard_batch(batch["input_ids"], mesh=sequence, attention_mask=seen)
        found = model(**local).logits
    rows = local["annulus"].rows
    real = of_rows(seen, rows) == 1
    torch.testing.assert_close(found[real], of_rows(expected, rows)[real], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", ["contiguous", "striped"])
def test_layouts_choices_and_batches_on_an_axis(layout):
    size = annulus.mesh({"sp": -1}).size
    mesh = annulus.mesh({1: "dp=1,sp=1", 2: "dp=2,sp=1", 4: "dp=2,sp=2"}[size])
    batch = make_batch(packed=True)
    expected = whole_step(make_model("gpt-oss", "eager"), batch, LENGTHS)
    compare(sharded_step(make_model("gpt-oss", "annulus"), batch, mesh, layout=layout,
                         choices={"schedule": "allgather"}), expected)


def test_checkpointed_compiled_and_with_the_loss_of_transformers(sequence):
    batch = make_batch()
    expected = whole_step(make_model("gpt-oss", "eager"), batch)
    model = make_model("gpt-oss", "annulus")
    model.gradient_checkpointing_enable()
    compare(sharded_step(model, batch, sequence), expected)
    local = annulus.hf.shard_batch(**batch, mesh=sequence)
    own = model(**local, labels=local["shift_labels"])
    torch.testing.assert_close(own.loss, annulus.hf.loss(own.logits, local))

    model = make_model("Llama", "annulus")
    with torch.no_grad():
        plain = model(**local).logits
        compiled = torch.compile(model, backend="aot_eager")(**local).logits
    torch.testing.assert_close(compiled, plain)


def test_a_decoder_as_an_encoder(sequence):
    batch = make_batch()
    with torch.no_grad():
        whole = make_model("Mistral", "eager")(batch["input_ids"], is_causal=False).logits
        local = annulus.hf.shard_batch(batch["input_ids"], mesh=sequence)
        found = make_model("Mistral", "annulus")(**local, is_causal=False).logits
    torch.testing.assert_close(found, of_rows(whole, local["annulus"].rows), atol=2e-5, rtol=2e-5)


def test_dropout_is_the_same_under_every_sharding(sequence):
    model = make_model("Llama", "annulus", attention_dropout=0.4)
    batch = make_batch()
    meshes = {"sharded": sequence, "alone": annulus.mesh(f"replicas={sequence.size}")}
    found = {}
    with torch.no_grad():
        for seed in (1, 2):
            for name, mesh in meshes.items():
                local = annulus.hf.shard_batch(batch["input_ids"], mesh=mesh, dropout_seed=seed,
                                               spec="-,sp" if name == "sharded" else "-,-")
                found[name, seed] = model(**local).logits
                rows = local["annulus"].rows
                if name == "sharded":
                    kept = rows
    for seed in (1, 2):
        torch.testing.assert_close(found["sharded", seed], of_rows(found["alone", seed], kept),
                                   atol=2e-5, rtol=2e-5)
    assert not torch.allclose(found["alone", 1], found["alone", 2], atol=1e-3)
    with refused("dropout"):
        model(**annulus.hf.shard_batch(batch["input_ids"], mesh=sequence))


MISTAKES = [
    ("annulus", {"annulus": None}),
    ("attention_mask", {"attention_mask": torch.ones(1, 1)}),
    ("attention_mask", {"attention_mask": torch.zeros(1, 1, 1, 1)}),
    ("position_ids", {"position_ids": None}),
    ("output_attentions", {"output_attentions": True}),
    ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 4])}),
    ("head_mask", {"head_mask": torch.ones(4)}),
    ("position_bias", {"position_bias": torch.ones(4)}),
]


@pytest.mark.parametrize("argument, keywords", MISTAKES)
def test_keywords_of_a_model_that_are_refused(sequence, argument, keywords):
    model = make_model("Llama", "annulus").eval()
    local = annulus.hf.shard_batch(make_batch()["input_ids"] % 9, mesh=sequence, layout="striped",
                                   position_ids=torch.arange(7, 7 + LENGTH)[None])
    with refused(argument) as caught:
        model(**{**local, **keywords})
    assert argument in str(caught.value)


def test_models_that_are_refused(sequence):
    local = annulus.hf.shard_batch(make_batch()["input_ids"], mesh=sequence)
    model = make_model("Llama", "annulus").eval()
    with pytest.raises(annulus.ArgumentError) as caught:
        model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2)
    assert caught.value.argument in ("attention_mask", "use_cache", "annulus")
    # A layer that says other things than its mask, or has none.
    layer = make_model("Mistral", "annulus").model.layers[0].self_attn
    mask = annulus._hf_mask.read(1, 4, 4)
    q = torch.ones(1, 4, 4, 8)
    for argument, mask, keywords in (("sliding_window", mask, {"sliding_window": 5}),
                                     ("is_causal", mask, {"is_causal": False}),
                                     ("attention_mask", None, {})):
        with refused(argument):
            annulus.hf.attention_forward(layer, q, q, q, mask, annulus=local["annulus"], **keywords)


def test_mask_functions_that_are_refused():
    from transformers import masking_utils as made

    read = annulus._hf_mask.read
    window = made.sliding_window_causal_mask_function(5)
    assert read(1, 8, 8, mask_function=window) == annulus._hf_mask.Mask(causal=True, left=4)
    both = made.and_masks(window, made.sliding_window_overlay(3),
                          made.sliding_window_bidirectional_overlay(6))
    assert read(1, 8, 8, mask_function=both) == annulus._hf_mask.Mask(True, 2, 6)
    for function in (made.or_masks(window, made.bidirectional_mask_function),
                     made.and_masks(window, lambda b, h, q, k: k >= 0),
                     made.blockwise_overlay(torch.zeros(1, 8))):
        with refused("mask_function"):
            read(1, 8, 8, mask_function=function)
    for keywords in ({"kv_length": 9}, {"q_offset": 1}, {"kv_offset": 1}):
        with refused("use_cache"):
            read(**{"batch_size": 1, "q_length": 8, "kv_length": 8, **keywords})


IDS = torch.ones(1, 8, dtype=torch.long)


@pytest.mark.parametrize("argument, keywords", [
    ("input_ids", {"input_ids": torch.ones(8, dtype=torch.long)}),
    ("input_ids", {"input_ids": torch.ones(1, 8)}),
    ("labels", {"labels": IDS[:, :7]}),
    ("position_ids", {"position_ids": torch.arange(7)[None]}),
    ("attention_mask", {"attention_mask": 2 * IDS}),
    ("attention_mask", {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.long)}),
    ("cu_seq_lens_q", {"cu_seq_lens_q": torch.tensor([0, 5])}),
    ("cu_seq_lens_k", {"cu_seq_lens_q": torch.tensor([0, 5, 8]),
                       "cu_seq_lens_k": torch.tensor([0, 4, 8])}),
    ("position_ids", {"cu_seq_lens_q": torch.tensor([0, 5, 8]),
                      "position_ids": torch.arange(8)[None]}),
    ("seq_idx", {"seq_idx": -IDS}),
    ("max_length_q", {"cu_seq_lens_q": torch.tensor([0, 5, 8]), "max_length_q": 4}),
    ("choices", {"choices": {"causal": True}}),
])
def test_batches_that_are_refused(sequence, argument, keywords):
    with refused(argument):
        annulus.hf.shard_batch(**{"input_ids": IDS, "mesh": sequence, **keywords})


def test_mistakes_that_would_compute_wrong_losses(sequence):
    if sequence.size == 1:
        pytest.skip("needs several ranks")
    ids = make_batch()["input_ids"]
    local = annulus.hf.shard_batch(ids, ids, mesh=sequence)
    for argument, mistake in (
            ("input_ids", lambda: annulus.hf.shard_batch(ids + sequence.rank, mesh=sequence)),
            ("input_ids", lambda: annulus.hf.shard_batch(ids[:, sequence.rank:], mesh=sequence)),
            ("labels", lambda: annulus.hf.shard_batch(ids, ids + sequence.rank, mesh=sequence)),
            ("labels", lambda: annulus.hf.shard_batch(ids, ids if sequence.rank else None,
                                                      mesh=sequence)),
            ("attention_mask", lambda: annulus.hf.shard_batch(
                ids, attention_mask=ids.new_ones(ids.shape).tril(sequence.rank + 9), mesh=sequence)),
            ("dropout_seed", lambda: annulus.hf.shard_batch(ids, dropout_seed=sequence.rank,
                                                            mesh=sequence)),
            ("mesh", lambda: annulus.hf.shard_batch(ids, mesh={"context": -1})),
            ("attn_implementation", lambda: annulus.hf.loss(
                make_model("gpt-oss", "eager")(**local).logits, local))):
        with refused(argument):
            mistake()
    # A model cannot compute an empty part.
    empty = annulus.positions((1, 1), "-,sp", mesh=sequence, layout="zigzag")[1].size == 0
    with pytest.raises(annulus.ArgumentError if empty else annulus.UserError):
        annulus.hf.shard_batch(ids[:1, :1], mesh=sequence)


def test_more_batches_that_are_refused(sequence):
    with pytest.raises(TypeError, match="token_type_ids"):
        annulus.hf.shard_batch(IDS, token_type_ids=IDS)
    with pytest.raises(annulus.UserError):
        annulus.hf.shard_batch(IDS, mesh=sequence, layout="diagonal")
    with pytest.raises(annulus.UserError):
        annulus.hf.shard_batch(IDS, mesh=sequence, spec="xp,sp")
    kind = annulus.ArgumentError if sequence.rank == 0 else annulus.UserError
    with pytest.raises(kind):
        annulus.hf.shard_batch(IDS if sequence.rank else IDS[0], mesh=sequence)
    local = annulus.hf.shard_batch(IDS, mesh=sequence)
    with pytest.raises(annulus.ArgumentError):
        annulus.hf.loss(torch.zeros(1, 8, 4), local)
    if sequence.size > 1:
        with pytest.raises(annulus.ArgumentError):
            annulus.hf.sum_gradients(torch.nn.Linear(1, 1), f"tp={sequence.size}")
    model = make_model("Llama 4", "annulus")
    with refused("attention_chunk_size"):  # chunks from the first token on
        model(**annulus.hf.shard_batch(IDS, mesh=sequence, attention_mask=IDS * (IDS.cumsum(1) > 2)))
