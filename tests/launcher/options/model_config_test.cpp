// Configurations of Hugging Face models: the attention of a layer that they describe.
#include "launcher/options/model_config.hpp"

#include <array>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/launcher/options/parsing.hpp"
#include "tests/support/message_of.hpp"

namespace annulus::launcher {
namespace {

using ::testing::ElementsAre;

constexpr const char* kLlama = R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "torch_dtype": "bfloat16", "attention_dropout": 0.0, "sliding_window": null})";
constexpr const char* kGptOss = R"({"architectures": ["GptOssForCausalLM"], "head_dim": 64,
    "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2,
    "sliding_window": 128, "model_type": "gpt_oss"})";
constexpr const char* kGemma2 = R"({"architectures": ["Gemma2ForCausalLM"], "head_dim": 256,
    "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
    "num_hidden_layers": 26, "sliding_window": 4096, "model_type": "gemma2",
    "attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256})";

ModelLayer layer_of(const std::string& text, std::optional<std::int64_t> layer = {}) {
  return read_model_config(text, "config.json", layer);
}
std::string error_of_config(const std::string& text, std::optional<std::int64_t> layer = {}) {
  return test::message_of<UserError>([&] { static_cast<void>(layer_of(text, layer)); });
}

TEST(ModelConfig, AModelWithoutWindows) {
  const ModelLayer layer = layer_of(kLlama);
  EXPECT_EQ(layer.sizes, (ModelSizes{32, 8, 128}));
  EXPECT_EQ(layer.dtype, DType::bfloat16);
  EXPECT_EQ(layer.causal, true);
  EXPECT_FALSE(layer.window || layer.chunk || layer.scale || layer.soft_cap);
}

// sliding_window counts the row's own key, as annulus.hf reads it too.
TEST(ModelConfig, AWindowSeesAsManyKeysAsItSays) {
  const ModelLayer layer = layer_of(kGptOss, 0);
  EXPECT_EQ(layer.window, (ModelWindow{127, 127}));
  EXPECT_TRUE(layer.has_sinks);
  EXPECT_FALSE(layer_of(kGptOss, 1).window.has_value());
}

TEST(ModelConfig, LayersThatDifferMustBeNamed) {
  EXPECT_THAT(error_of_config(kGptOss),
              AllOf(HasSubstr("layer: got nothing, expected one of 0 to 1"),
                    HasSubstr("full_attention, sliding_attention"), HasSubstr("layer 0: sliding")));
  EXPECT_THAT(error_of_config(kGptOss, 2), HasSubstr("layer: got 2, expected 0 to 1"));
}

TEST(ModelConfig, OlderFilesLeaveWindowsToTheModel) {
  EXPECT_EQ(layer_of(kGemma2, 0).window, (ModelWindow{4095, 4095}));
  EXPECT_FALSE(layer_of(kGemma2, 1).window.has_value());
  EXPECT_EQ(layer_of(kGemma2, 0).soft_cap, 50);
  EXPECT_EQ(layer_of(kGemma2, 0).scale, 0.0625);
  const std::string sizes = R"("num_attention_heads": 4, "head_dim": 8, "num_hidden_layers": 12,
      "sliding_window": 16, "architectures": ["XForCausalLM"])";
  EXPECT_EQ(layer_of("{" + sizes + "}").window, (ModelWindow{15, 15})) << "as Mistral: all layers";
  EXPECT_FALSE(layer_of("{" + sizes + R"(, "use_sliding_window": false})").window.has_value());
  const std::string qwen = "{" + sizes + R"(, "use_sliding_window": true, "max_window_layers": 8})";
  EXPECT_FALSE(layer_of(qwen, 7).window.has_value());
  EXPECT_EQ(layer_of(qwen, 8).window, (ModelWindow{15, 15}));
  const std::string gemma3 = "{" + sizes + R"(, "sliding_window_pattern": 6})";
  EXPECT_EQ(layer_of(gemma3, 4).window, (ModelWindow{15, 15}));
  EXPECT_FALSE(layer_of(gemma3, 5).window.has_value());
}

TEST(ModelConfig, ChunksAndModelsOfSeveralKindsOfInput) {
  const ModelLayer layer = layer_of(R"({"architectures": ["Llama4ForConditionalGeneration"],
      "torch_dtype": "float16", "text_config": {"num_attention_heads": 40, "head_dim": 128,
      "num_key_value_heads": 8, "attention_chunk_size": 8192,
      "layer_types": ["chunked_attention", "full_attention"]}})",
                                    0);
  EXPECT_EQ(layer.chunk, 8192);
  EXPECT_EQ(layer.dtype, DType::float16);
  EXPECT_EQ(layer.causal, true);
}

// As published, with the layers of chunks left to the model's code.
TEST(ModelConfig, LayersWithRotaryPositionsSeeChunks) {
  const auto with = [](const std::string& more) {
    return R"({"architectures": ["Llama4ForConditionalGeneration"], "text_config":
        {"num_attention_heads": 40, "head_dim": 128, "num_key_value_heads": 8,
         "attention_chunk_size": 8192, "num_hidden_layers": 8)" +
           more + "}}";
  };
  for (const char* more : {R"(, "no_rope_layers": [])", R"(, "model_type": "llama4_text")"}) {
    for (const int layer : {0, 1, 2, 4, 5, 6}) EXPECT_EQ(layer_of(with(more), layer).chunk, 8192);
    for (const int layer : {3, 7}) EXPECT_FALSE(layer_of(with(more), layer).chunk.has_value());
  }
  const std::string every_second = with(R"(, "no_rope_layers": [], "no_rope_layer_interval": 2)");
  EXPECT_EQ(layer_of(every_second, 2).chunk, 8192);
  EXPECT_FALSE(layer_of(every_second, 1).chunk.has_value());
  const std::string listed = with(R"(, "no_rope_layers": [0, 1, 1, 1, 1, 1, 1, 0])");
  EXPECT_FALSE(layer_of(listed, 0).chunk.has_value());
  EXPECT_EQ(layer_of(listed, 3).chunk, 8192);
  EXPECT_THAT(error_of_config(with(R"(, "no_rope_layers": [1])"), 0),
              HasSubstr("no_rope_layers: has 1 entries"));
  EXPECT_THAT(error_of_config(with(R"(, "no_rope_layers": [1, 1, 1, 1, 1, 1, 1, 2])"), 0),
              HasSubstr("no_rope_layers: expected 0 and 1"));
  EXPECT_THAT(error_of_config(with("")), HasSubstr("attention_chunk_size without layer_types"));
}

// EmbeddingGemma's 512 is 257 in transformers, which counts the row's own key: 256 on either side.
TEST(ModelConfig, BidirectionalGemmaHalvesItsWindow) {
  const auto with = [](const std::string& bidirectional) {
    return layer_of(R"({"architectures": ["Gemma3TextModel"], "num_attention_heads": 3,
        "head_dim": 256, "sliding_window": 512, "layer_types": ["sliding_attention"],
        "use_bidirectional_attention": )" +
                    bidirectional + "}");
  };
  for (const char* value : {"true", R"("all")"}) {
    const ModelLayer layer = with(value);
    EXPECT_EQ(layer.causal, false);
    EXPECT_EQ(layer.window, (ModelWindow{256, 256}));
  }
  for (const char* value : {"false", R"("vision")"}) {
    const ModelLayer layer = with(value);
    EXPECT_EQ(layer.causal, true);
    EXPECT_EQ(layer.window, (ModelWindow{511, 511}));
  }
  const ModelLayer unsaid = with("null");
  EXPECT_FALSE(unsaid.causal.has_value());
  EXPECT_EQ(unsaid.window, (ModelWindow{511, 512}));
  const auto error = [&](const char* value) {
    return test::message_of<UserError>([&] { static_cast<void>(with(value)); });
  };
  EXPECT_THAT(error(R"("some")"), HasSubstr("use_bidirectional_attention = 'some', expected"));
  EXPECT_THAT(error("2"), HasSubstr("use_bidirectional_attention = 2, expected a bool"));
  EXPECT_THAT(error("null, \"global_head_dim\": 512"), HasSubstr("has global_head_dim"));
}

TEST(ModelConfig, TheWindowFollowsTheFinalValueOfCausal) {
  const auto window = [](const std::string& more, const std::string& options) {
    const OptionFile config(R"({"num_attention_heads": 8, "head_dim": 8, "sliding_window": 16)" +
                            more + "}");
    const Options parsed = parse("plan --shape 1,8k,8k --model-config " + config.path() + options);
    return std::array{parsed.window->left, parsed.window->right};
  };
  const std::string mistral = R"(, "architectures": ["MistralForCausalLM"])";
  EXPECT_THAT(window(mistral, ""), ElementsAre(15, 0));
  EXPECT_THAT(window(mistral, " --causal=false"), ElementsAre(15, 15));
  EXPECT_THAT(window(mistral, " --causal=false --window 7,3"), ElementsAre(7, 3));
  EXPECT_THAT(window("", " --causal=false"), ElementsAre(16, 16));
  EXPECT_THAT(test::message_of<UserError>([&] { window("", ""); }),
              HasSubstr("does not say whether its attention is causal (it has no architectures): "
                        "give --causal, or --causal=false"));
  EXPECT_THAT(window("", " --causal"), ElementsAre(15, 0));
  const Variable causal("ANNULUS_CAUSAL", "true");
  EXPECT_THAT(window("", ""), ElementsAre(15, 0));
}

TEST(ModelConfig, WhatIsNotUnderstoodIsRefused) {
  EXPECT_THAT(error_of_config("[1]"), HasSubstr("config.json: is not a JSON object"));
  EXPECT_THAT(error_of_config("{"), HasSubstr("is not a JSON object"));
  EXPECT_THAT(error_of_config("{}"), HasSubstr("lacks num_attention_heads"));
  EXPECT_THAT(error_of_config(R"({"num_attention_heads": 7, "num_key_value_heads": 2})"),
              HasSubstr("not a multiple"));
  EXPECT_THAT(error_of_config(R"({"num_attention_heads": -7})"),
              HasSubstr("num_attention_heads = -7, expected a whole number"));
  EXPECT_THAT(error_of_config(R"({"num_attention_heads": 8, "kv_lora_rank": 512})"),
              HasSubstr("latent attention"));
  EXPECT_THAT(error_of_config(R"({"num_attention_heads": 8, "head_dim": 8, "layer_types":
      ["linear_attention"]})"),
              HasSubstr("a layer is linear_attention"));
  EXPECT_THAT(error_of_config(R"({"num_attention_heads": 8, "head_dim": 8, "layer_types":
      ["sliding_attention"]})"),
              HasSubstr("sliding_window is missing"));
  EXPECT_THAT(error_of_config(R"({"num_attention_heads": 8, "head_dim": 8, "dtype": "int3"})"),
              HasSubstr("dtype = 'int3'"));
}

TEST(ModelConfig, GivesOptionsThatTheCommandLineOverrides) {
  const OptionFile config(kGemma2);
  const std::string words = "plan --shape 1,8k,8k --model-config " + config.path();
  const Options options = parse(words + " --layer 2");
  EXPECT_EQ(options.shape->heads, 8);
  EXPECT_EQ(options.shape->kv_heads, 4);
  EXPECT_EQ(options.shape->head_dim, 256);
  EXPECT_TRUE(options.causal);
  EXPECT_EQ(options.window->left, 4095);
  EXPECT_EQ(options.window->right, 0);
  EXPECT_EQ(options.soft_cap, 50);
  EXPECT_EQ(parse(words + " --layer 2 --window 7").window->left, 7);
  EXPECT_THAT(error_of(words), HasSubstr("--layer: got nothing, expected one of 0 to 25"));
  EXPECT_THAT(error_of(words + " --layer 26"), HasSubstr("--layer: got 26"));
  EXPECT_THAT(error_of("plan --shape 1,8k,8k,8,4,256 --layer 2"),
              HasSubstr("--layer 2: has no effect without --model-config"));
  EXPECT_THAT(
      error_of("plan --shape 1,8k,8k,8,8,256 --model-config " + config.path() + " --layer 1"),
      HasSubstr("--shape: got N=8 K=8 D=256, expected N=8 K=4 D=256"));
}

// A file of tensors has its own dtype.
TEST(ModelConfig, ItsDtypeIsForTensorsThatAreMade) {
  const OptionFile config(kLlama);
  EXPECT_EQ(parse("bench --shape 1,8,8 --model-config " + config.path()).dtype, DType::bfloat16);
  const Options run = parse("run --model-config " + config.path());
  EXPECT_FALSE(run.dtype.has_value());
  EXPECT_EQ(run.model_sizes, (ModelSizes{32, 8, 128}));
}

}  // namespace
}  // namespace annulus::launcher
