#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <annulus/core/bytes.hpp>
#include <annulus/core/error.hpp>
#include <annulus/mesh/control.hpp>

#include "control/bytes_of.hpp"

namespace annulus {
namespace {

const char* const kGiveText = "give its text";

// A run of neighbouring ranks with the same text: their number, the text's length, and the text.
struct Run {
  std::uint64_t ranks;
  std::uint64_t bytes;
};

std::string run_of(const std::string& text) {
  std::string encoded;
  append(encoded, Run{1, text.size()});
  return encoded + text;
}

// Calls each(offset, run) for the runs of a text.
template <class Each>
void for_each_run(const std::string& runs, const Each& each) {
  for (std::size_t at = 0; at < runs.size();) {
    const auto run = value_at<Run>(runs, at);
    each(at, run);
    at += sizeof(Run) + run.bytes;
  }
}

// Appends the runs of later ranks, joining a run that continues.
void add_runs(std::string& whole, const std::string& later) {
  std::size_t last = 0;
  for_each_run(whole, [&](std::size_t at, const Run&) { last = at; });
  auto before = value_at<Run>(whole, last);
  const auto next = value_at<Run>(later, 0);
  const std::size_t text = last + sizeof(Run);
  if (whole.compare(text, std::string::npos, later, sizeof(Run), next.bytes) != 0) {
    whole += later;
    return;
  }
  before.ranks += next.ranks;
  std::memcpy(whole.data() + last, &before, sizeof(Run));
  whole.append(later, sizeof(Run) + next.bytes);
}

std::set<std::string> texts_of(const std::string& runs) {
  std::set<std::string> texts;
  for_each_run(runs, [&](std::size_t at, const Run& run) {
    texts.insert(runs.substr(at + sizeof(Run), run.bytes));
  });
  return texts;
}

void add_distinct(std::string& whole, const std::string& later) {
  std::set<std::string> texts = texts_of(whole);
  texts.merge(texts_of(later));
  whole.clear();
  for (const std::string& text : texts) whole += run_of(text);
}

void keep_first(std::string& whole, const std::string& later) {
  if (whole.empty()) whole = later;
}

}  // namespace

void Control::barrier(std::string_view what) {
  (void)combine({what, "arrive"}, {}, keep_first, Result::on_all);
}

std::string Control::merge_text(std::string text, const Merge& merge, std::string_view what) {
  return combine({what, kGiveText}, std::move(text), merge, Result::on_all);
}

std::string Control::broadcast(std::string text, std::string_view what) {
  if (rank() > 0) text.clear();
  return merge_text(
      std::move(text), [](std::string&, const std::string&) {}, what);
}

std::string Control::first_text(std::string text, std::string_view what) {
  return merge_text(std::move(text), keep_first, what);
}

std::set<std::string> Control::distinct_texts(const std::string& text, std::string_view what) {
  return texts_of(merge_text(run_of(text), add_distinct, what));
}

// Processes of different builds may hash differently, so only texts prove that ranks differ.
std::optional<Control::Difference> Control::first_difference(const std::string& text,
                                                             std::string_view what) {
  std::string hash;
  append(hash, std::hash<std::string>()(text));
  const std::string same = merge_text(
      hash,
      [](std::string& whole, const std::string& later) {
        if (whole != later) whole.clear();
      },
      what);
  if (!same.empty()) return std::nullopt;
  std::string expected = broadcast(text, what);
  std::string mine;
  if (text != expected) {
    append(mine, rank());
    mine += text;
  }
  const std::string first = first_text(mine, what);
  if (first.empty()) return std::nullopt;
  return Difference{value_at<int>(first, 0), first.substr(sizeof(int)), std::move(expected)};
}

std::vector<std::string> Control::gather_text(const std::string& text, std::string_view what) {
  return gather(text, what, Result::on_all);
}

std::vector<std::string> Control::collect_text(const std::string& text, std::string_view what) {
  return gather(text, what, Result::on_first);
}

std::vector<std::string> Control::gather(const std::string& text, std::string_view what,
                                         Result where) {
  const std::string all = combine({what, kGiveText}, run_of(text), add_runs, where);
  std::vector<std::string> texts;
  for_each_run(all, [&](std::size_t at, const Run& run) {
    texts.insert(texts.end(), run.ranks, all.substr(at + sizeof(Run), run.bytes));
  });
  return texts;
}

std::vector<double> Control::sum(std::span<const double> values, std::string_view what) {
  return reduce(values, what, [](double a, double b) { return a + b; });
}

std::vector<double> Control::max(std::span<const double> values, std::string_view what) {
  return reduce(values, what, [](double a, double b) { return std::isnan(b) || b > a ? b : a; });
}

std::vector<double> Control::reduce(std::span<const double> values, std::string_view what,
                                    const std::function<double(double, double)>& combine) {
  const auto add = [&](std::string& whole, const std::string& later) {
    if (later.size() != whole.size()) {
      throw InternalError(fmt::format("{}: one rank gave {} numbers and another one {}", what,
                                      whole.size() / sizeof(double),
                                      later.size() / sizeof(double)));
    }
    for (std::size_t at = 0; at < whole.size(); at += sizeof(double)) {
      const double both = combine(value_at<double>(whole, at), value_at<double>(later, at));
      std::memcpy(whole.data() + at, &both, sizeof(double));
    }
  };
  const std::string all =
      this->combine({what, fmt::format("give {}", human_bytes(values.size_bytes()))},
                    std::string(reinterpret_cast<const char*>(values.data()), values.size_bytes()),
                    add, Result::on_all);
  std::vector<double> result(values.size());
  if (!result.empty()) std::memcpy(result.data(), all.data(), all.size());
  return result;
}

}  // namespace annulus
