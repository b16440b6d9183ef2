// The two file formats: what is accepted, and how everything else is refused.
#include <array>
#include <limits>
#include <random>
#include <sys/stat.h>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/files/array_file.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/files/integer_file.hpp>
#include <annulus/mesh/group.hpp>

#include "tests/launcher/files/files_test_support.hpp"
#include "tests/support/message_of.hpp"
#include "tests/support/thrown_by.hpp"

namespace annulus::files {
namespace {

using test::npy;
using test::npy_dictionary;
using test::safetensors;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

constexpr std::array kDTypes{DType::boolean,  DType::uint8,   DType::int32,  DType::float16,
                             DType::bfloat16, DType::float32, DType::float64};

std::string random_data(DType dtype, std::int64_t elements, std::mt19937& random) {
  std::string data(static_cast<std::size_t>(elements) * size_of(dtype), '\0');
  const unsigned values = dtype == DType::boolean ? 2 : 256;
  for (char& byte : data) byte = static_cast<char>(random() % values);
  return data;
}

std::string read_all(const ArrayFile& file) {
  std::string data(static_cast<std::size_t>(file.shape().product()) * size_of(file.dtype()), '#');
  file.read_slice(whole(file.shape()), {data.data(), file.dtype(), file.shape()});
  return data;
}

class Files : public ::testing::Test {
 protected:
  test::ScratchDirectory scratch_;
  std::shared_ptr<Control> group_ = make_self_group()->shared_control();
};

TEST_F(Files, EveryDTypeAndRankSurvivesARoundTrip) {
  std::mt19937 random(1);
  for (const DType dtype : kDTypes) {
    for (const Extents& shape : {Extents{}, Extents{5}, Extents{0}, Extents{2, 0, 3},
                                 Extents{2, 3, 4, 5}, Extents{1, 2, 1, 2, 1, 3}}) {
      for (const char* name : {"a.npy", "a.safetensors"}) {
        SCOPED_TRACE(std::string(name_of(dtype)) + " " + to_string(shape) + " " + name);
        const std::string path = scratch_.file(name);
        std::string data = random_data(dtype, shape.product(), random);
        test::write_array(path, "x", dtype, shape, data.data());
        const ArrayFile file(path, "x", {dtype});
        EXPECT_EQ(file.dtype(), dtype);
        EXPECT_EQ(file.shape(), shape);
        EXPECT_EQ(read_all(file), data);
      }
    }
  }
}

TEST_F(Files, SeveralTensorsShareASafetensorsFile) {
  const std::string path = scratch_.file("out.safetensors");
  const std::vector<std::string> data{{'\1', '\0', '\1'}, "abcdef", "0123456789abcdef"};
  const std::vector<ArraySpec> specs{{"mask", DType::boolean, {3}},
                                     {"output", DType::float16, {1, 3}},
                                     {"lse", DType::float32, {2, 2}}};
  ArrayWriter writer(*group_, path, specs);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    writer.write_slice(whole(specs[i].shape), {data[i].data(), specs[i].dtype, specs[i].shape}, i);
  }
  writer.commit();
  EXPECT_EQ(tensor_names(path), (std::vector<std::string>{"lse", "mask", "output"}));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    EXPECT_EQ(read_all(ArrayFile(path, specs[i].name)), data[i]) << specs[i].name;
  }
}

TEST_F(Files, ReadsEveryNpyVersionAndSpelling) {
  const std::string path = scratch_.file("a.npy");
  const std::string data = "abcdefgh";
  for (const int major : {1, 2, 3}) {
    for (const std::string& dictionary :
         {npy_dictionary("<f4", "(2,)"),
          std::string("{'descr':'<f4','fortran_order':False,"
                      "'shape':(2,)}"),
          std::string("{ \"shape\" : ( 2 , ) , \"fortran_order\" : False, \"descr\": \"<f4\" }   "),
          npy_dictionary("<f4", "(1, 2)"), npy_dictionary("<f4", "(1, 2,)")}) {
      SCOPED_TRACE(std::to_string(major) + " " + dictionary);
      test::write_bytes(path, npy(major, dictionary, data));
      const ArrayFile file(path);
      EXPECT_EQ(file.dtype(), DType::float32);
      EXPECT_EQ(file.shape().product(), 2);
      EXPECT_EQ(read_all(file), data);
    }
  }
}

TEST_F(Files, SafetensorsMayCarryMetadataAndForeignTensors) {
  const std::string path = scratch_.file("a.safetensors");
  test::write_bytes(path, safetensors(R"({"__metadata__":{"format":"pt"},
      "steps":{"dtype":"I64","shape":[1,1,1,1,1,1,1],"data_offsets":[0,8]},
      "x":{"dtype":"I32","shape":[2],"data_offsets":[8,16]}} )",
                                      "--------abcdefgh"));
  EXPECT_EQ(read_all(ArrayFile(path, "x")), "abcdefgh");
  EXPECT_EQ(tensor_names(path), (std::vector<std::string>{"steps", "x"}));
  EXPECT_THROW(ArrayFile(path, "steps"), FileError);
}

TEST_F(Files, DTypeIsWhatTheCallerNeeds) {
  const std::string bits = scratch_.file("bits.npy");
  test::write_bytes(bits, npy(1, npy_dictionary("<u2", "(2,)"), "abcd"));
  EXPECT_EQ(ArrayFile(bits, {}, {DType::bfloat16}).dtype(), DType::bfloat16);
  EXPECT_THROW(ArrayFile{bits}, FileError);
  for (const char* const descr : {"<V2", "|V2"}) {  // as ml_dtypes writes it
    test::write_bytes(bits, npy(1, npy_dictionary(descr, "(2,)"), "abcd"));
    EXPECT_EQ(ArrayFile(bits, {}, {DType::bfloat16}).dtype(), DType::bfloat16);
    EXPECT_EQ(read_all(ArrayFile(bits, {}, {DType::bfloat16})), "abcd");
    EXPECT_THROW(ArrayFile{bits}, FileError);
    EXPECT_THROW(ArrayFile(bits, {}, {DType::float16}), FileError);
  }
  EXPECT_THROW(ArrayFile(bits, {}, {DType::float16}), FileError);
  const std::string halves = scratch_.file("halves.npy");
  test::write_bytes(halves, npy(1, npy_dictionary("<f2", "(2,)"), "abcd"));
  EXPECT_EQ(ArrayFile(halves, {}, {DType::float16}).dtype(), DType::float16);
  EXPECT_THROW(ArrayFile(halves, {}, {DType::bfloat16}), FileError);
}

TEST_F(Files, BoolsAreZeroOrOne) {
  const std::string path = scratch_.file("mask.npy");
  test::write_bytes(path, npy(1, npy_dictionary("|b1", "(4,)"), std::string("\0\1\2\1", 4)));
  const ArrayFile file(path);
  EXPECT_THAT([&] { read_all(file); },
              ThrowsMessage<ArgumentError>(path + "[2]: got 2, expected 0 or 1"));
  std::array<bool, 2> two{};
  file.read_slice(std::array{PositionRanges({{GlobalPosition(1), 2, 2}})},
                  {two.data(), DType::boolean, {2}});
  EXPECT_TRUE(two[0] && two[1]);
}

TEST_F(Files, RefusesWhatIsNoRegularFile) {
  for (const char* name : {"missing.npy", ".", "missing/a.npy"}) {
    EXPECT_THROW(ArrayFile{scratch_.file(name)}, FileError) << name;
  }
  // A pipe without a writer must not be waited for.
  const std::string pipe = scratch_.file("pipe.npy");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THROW(ArrayFile{pipe}, FileError);
}

TEST_F(Files, NoticesThatAFileShrankAfterOpening) {
  const std::string path = scratch_.file("a.npy");
  test::write_bytes(path, npy(1, npy_dictionary("|u1", "(8,)"), "abcdefgh"));
  const ArrayFile file(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
  EXPECT_THROW(read_all(file), FileError);
}

struct Malformed {
  const char* name;
  std::string bytes;
  const char* message;  // part of it
};

void expect_refused(const std::string& path, const Malformed& malformed) {
  SCOPED_TRACE(malformed.name);
  test::write_bytes(path, malformed.bytes);
  const auto error = test::thrown_by<FileError>([&] { const ArrayFile file(path, "x"); });
  EXPECT_EQ(error.path(), path);
  EXPECT_THAT(error.what(), HasSubstr(path));
  EXPECT_THAT(error.what(), HasSubstr(malformed.message));
}

TEST_F(Files, RefusesMalformedNpy) {
  const std::string data(64, 'd');
  const auto with = [&](const std::string& descr, const std::string& shape) {
    return npy(1, npy_dictionary(descr, shape), data);
  };
  const auto dictionary = [&](const std::string& text) { return npy(1, text, data); };
  const std::string good = with("<f4", "(2, 3)");
  const std::string huge = std::to_string(std::numeric_limits<std::int64_t>::max());
  const std::vector<Malformed> corpus{
      {"empty file", "", "is empty, expected a .npy file"},
      {"wrong magic", "\x94NUMPY" + good.substr(6), "expected a .npy file"},
      {"magic only", good.substr(0, 6), "ends inside"},
      {"no header length", good.substr(0, 9), "ends inside"},
      {"version 0", npy(0, npy_dictionary("<f4", "(2,)"), data), "format 0.0"},
      {"version 4", npy(4, npy_dictionary("<f4", "(2,)"), data), "format 4.0"},
      {"header beyond the file", good.substr(0, 40), "header of"},
      {"header length of 4 GiB", "\x93NUMPY\2" + std::string(1, '\0') + "\xff\xff\xff\xff{}",
       "header of 4294967295 bytes"},
      {"data cut off", with("<f4", "(4, 5)"),
       "does not fit the 64 bytes of data: expected 80 bytes"},
      {"data left over", with("<f4", "(4, 3)"),
       "shape [4, 3] of float32 does not fit the 64 bytes of data: expected 48 bytes"},
      {"data of an empty array", with("<f4", "(0, 3)"), "expected 0 bytes"},
      {"one byte short", npy(1, npy_dictionary("<f4", "(2,)"), "abcdefg"), "does not fit"},
      {"negative shape", with("<f4", "(-2, 3)"), "size of 0 or more"},
      {"shape beyond 64 bits", with("<f4", "(99999999999999999999,)"), "too large"},
      {"product overflows", with("<f4", "(4294967296, 4294967296)"), "does not fit"},
      {"bytes overflow", with("<f8", "(" + huge + ",)"), "does not fit"},
      {"overflow hidden by a zero", with("<f4", "(0, " + huge + ", " + huge + ")"), "does not fit"},
      {"seven dimensions", with("<f4", "(1, 1, 1, 1, 1, 1, 1)"), "7 dimensions"},
      {"fractional shape", with("<f4", "(2.5, 2)"), "expected ','"},
      {"number for tuple", with("<f4", "(2)"), "tuple"},
      {"list for tuple", with("<f4", "[2, 3]"), "expected '('"},
      {"comma only", with("<f4", "(,)"), "size of 0 or more"},
      {"tuple without end", with("<f4", "(2, 3"), "expected"},
      {"big-endian", with(">f4", "(2,)"),
       "dtype '>f4' is big-endian, expected a little-endian one (array.astype('<f4')"},
      {"complex", with("<c8", "(2,)"), "expected bool, uint8"},
      {"int64", with("<i8", "(2,)"), "dtype '<i8'"},
      {"object", with("|O", "(2,)"), "dtype '|O'"},
      {"two bytes unasked", with("<V2", "(2,)"), "--dtype bfloat16"},
      {"four bytes", with("<V4", "(1,)"), "<V4"},
      {"uint16 unasked", with("<u2", "(2,)"), "bfloat16"},
      {"structured",
       dictionary("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }"),
       "structured"},
      {"Fortran order", dictionary("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }"),
       "Fortran"},
      {"order is no bool", dictionary("{'descr': '<f4', 'fortran_order': 0, 'shape': (2, 3), }"),
       "True or False"},
      {"no shape", dictionary("{'descr': '<f4', 'fortran_order': False, }"), "expected the keys"},
      {"shape twice",
       dictionary("{'descr': '<f4', 'shape': (2,), 'fortran_order': False, 'shape': (3,), }"),
       "twice"},
      {"unknown key", dictionary("{'descr': '<f4', 'x': 1, }"), "unknown key 'x'"},
      {"no dictionary", dictionary("(1, 2)"), "expected '{'"},
      {"empty header", dictionary(""), "expected '{'"},
      {"string without end", dictionary("{'descr"), "unterminated"},
      {"text behind", dictionary(npy_dictionary("<f4", "(2,)") + " + 1"), "after the dictionary"},
      {"binary garbage", dictionary(std::string("{\0\xff\x80'", 5)), "expected a string"},
  };
  for (const Malformed& malformed : corpus) expect_refused(scratch_.file("bad.npy"), malformed);
}

TEST_F(Files, RefusesIntegersWithOtherThanTheirBytes) {
  const std::string npy_path = scratch_.file("lengths.npy");
  const std::string tensor_path = scratch_.file("lengths.safetensors");
  const auto message = [](const std::string& path) {
    return test::message_of<FileError>([&] { static_cast<void>(IntegerFile(path, "x")); });
  };
  for (const auto& [dtype, bytes] : {std::pair("<i4", 12), std::pair("<i8", 24)}) {
    for (const int more : {-1, 1}) {
      test::write_bytes(npy_path, npy(1, npy_dictionary(dtype, "(3,)"),
                                      std::string(static_cast<std::size_t>(bytes + more), '\0')));
      EXPECT_EQ(
          message(npy_path),
          fmt::format("{}: shape [3] of {} does not fit the {} bytes of data: expected {} bytes",
                      npy_path, dtype, bytes + more, bytes));
    }
    test::write_bytes(npy_path, npy(1, npy_dictionary(dtype, "(3,)"),
                                    std::string(static_cast<std::size_t>(bytes), '\0')));
    EXPECT_THAT(IntegerFile(npy_path, "x").read(), testing::ElementsAre(0, 0, 0));
  }
  test::write_bytes(
      tensor_path,
      safetensors(R"({"x":{"dtype":"I32","shape":[1],"data_offsets":[0,8]}})", "01234567"));
  EXPECT_EQ(message(tensor_path), tensor_path +
                                      ": tensor 'x': shape [1] of I32 does not fit the 8 "
                                      "bytes of data: expected 4 bytes");
}

TEST_F(Files, RefusesMalformedSafetensors) {
  const auto tensor = [](const std::string& body) {
    return safetensors("{\"x\":{" + body + "}}", "01234567");
  };
  const auto with = [&](const std::string& dtype, const std::string& shape,
                        const std::string& offsets) {
    return tensor("\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets);
  };
  const auto two = [](const std::string& first, const std::string& second) {
    const std::string body = R"(":{"dtype":"U8","shape":[4],"data_offsets":)";
    return safetensors("{\"x" + body + first + "},\"y" + body + second + "}}", "01234567");
  };
  const std::vector<Malformed> corpus{
      {"empty file", "", "too short"},
      {"seven bytes", "1234567", "too short"},
      {"header beyond the file", test::little_endian(9, 8) + "{}", "header of 9 bytes"},
      {"header of 2^64 - 1", std::string(8, '\xff') + "{}", "header of 18446744073709551615"},
      {"no JSON", safetensors("not json", ""), "not JSON"},
      {"cut JSON", safetensors("{\"x\":{\"dtype\":\"F32\"", ""), "not JSON"},
      {"not UTF-8", safetensors("{\"\xff\xfe\":1}", ""), "not JSON"},
      {"deep nesting", safetensors(std::string(100000, '['), ""), "not JSON"},
      {"a list", safetensors("[]", ""), "not a JSON object"},
      {"tensor is no object", safetensors("{\"x\":3}", ""), "no dtype"},
      {"no such tensor",
       safetensors(R"({"q":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", "0"),
       "no tensor 'x'; its tensors are: q"},
      {"dtype is no string", with("32", "[2]", "[0,8]"), "no dtype"},
      {"no shape", tensor(R"("dtype":"F32","data_offsets":[0,8])"), "'shape'"},
      {"no offsets", tensor(R"("dtype":"F32","shape":[2])"), "'data_offsets'"},
      {"unknown dtype", with("\"F8_E4M3\"", "[8]", "[0,8]"), "F8_E4M3, expected bool"},
      {"negative shape", with("\"F32\"", "[-2]", "[0,8]"), "'shape' is not a list of sizes"},
      {"fractional shape", with("\"F32\"", "[2.0]", "[0,8]"), "'shape' is not a list of sizes"},
      {"shape beyond 63 bits", with("\"F32\"", "[9223372036854775808]", "[0,8]"), "'shape'"},
      {"product overflows", with("\"F32\"", "[4294967296,4294967296]", "[0,8]"), "does not fit"},
      {"overflow hidden by a zero",
       with("\"F32\"", "[0,9223372036854775807,9223372036854775807]", "[0,8]"), "does not fit"},
      {"seven dimensions", with("\"U8\"", "[1,1,1,1,1,1,8]", "[0,8]"), "7 dimensions"},
      {"shape too small", with("\"F32\"", "[1]", "[0,8]"), "does not fit"},
      {"backward offsets", with("\"F32\"", "[2]", "[8,0]"), "data_offsets [8, 0]"},
      {"offsets beyond the file", with("\"F32\"", "[4]", "[0,16]"), "data_offsets [0, 16]"},
      {"one offset", with("\"F32\"", "[2]", "[8]"), "data_offsets [8]"},
      {"negative offset", with("\"F32\"", "[2]", "[-8,0]"), "'data_offsets'"},
      {"data left over", with("\"F32\"", "[1]", "[0,4]"), "end at byte 4 of 8"},
      {"data not from the start", with("\"F32\"", "[1]", "[4,8]"), "starts at byte 4"},
      {"overlap", two("[0,4]", "[2,6]"), "starts at byte 2"},
      {"same bytes twice", two("[0,8]", "[0,8]"), "starts at byte 0"},
      {"tensor twice",
       safetensors(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                   R"("x":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
                   "01234567"),
       "twice"},
  };
  for (const Malformed& malformed : corpus) {
    expect_refused(scratch_.file("bad.safetensors"), malformed);
  }
}

TEST_F(Files, NoCutOrFlippedByteOfAHeaderDoesHarm) {
  std::mt19937 random(2);
  const std::vector<std::pair<std::string, std::string>> files{
      {scratch_.file("f.npy"), npy(1, npy_dictionary("<f4", "(2, 3)"), std::string(24, '\1'))},
      {scratch_.file("f.safetensors"),
       safetensors(R"({"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}})",
                   std::string(24, '\1'))}};
  int refused = 0;
  for (const auto& [path, good] : files) {
    for (int trial = 0; trial < 600; ++trial) {
      std::string bytes = good.substr(0, trial % 4 == 0 ? random() % good.size() : good.size());
      for (unsigned flips = random() % 4; flips > 0 && !bytes.empty(); --flips) {
        bytes[random() % bytes.size()] = static_cast<char>(random());
      }
      test::write_bytes(path, bytes);
      try {
        read_all(ArrayFile(path, "x"));
      } catch (const FileError& error) {
        ++refused;
        ASSERT_EQ(error.path(), path);
      }
    }
  }
  EXPECT_GT(refused, 300);
}

}  // namespace
}  // namespace annulus::files
