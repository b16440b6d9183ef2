// We read what NumPy writes, and NumPy reads what we write.
#include <array>
#include <cstdlib>
#include <numeric>

#include <gtest/gtest.h>

#include <annulus/files/array_file.hpp>
#include <annulus/files/array_writer.hpp>
#include <annulus/mesh/group.hpp>

#include "tests/launcher/files/files_test_support.hpp"

namespace annulus::files {
namespace {

int python(const std::string& code) {
  return std::system(("/usr/bin/python3 -c \"import numpy as np\n" + code + "\"").c_str());
}

class NumPy : public ::testing::Test {
 protected:
  void SetUp() override {
    if (python("pass") != 0) GTEST_SKIP() << "/usr/bin/python3 has no NumPy";
  }
  test::ScratchDirectory scratch_;
};

TEST_F(NumPy, FilesThatItWritesAreRead) {
  struct Case {
    std::string numpy;
    DType dtype;
  };
  const std::string stem = scratch_.file("");
  ASSERT_EQ(python("for dtype in 'bool uint8 int32 float16 uint16 float32 float64'.split():\n"
                   "  a = (np.arange(24) % 2 * 5).astype(dtype).reshape(2, 3, 4)\n"
                   "  for version in 1, 2, 3:\n"
                   "    stem = '" +
                   stem +
                   "' + dtype + str(version)\n"
                   "    a.tofile(stem + '.raw')\n"
                   "    with open(stem + '.npy', 'wb') as f:\n"
                   "      np.lib.format.write_array(f, a, version=(version, 0))"),
            0);
  for (const auto& [numpy, dtype] :
       {Case{"bool", DType::boolean}, Case{"uint8", DType::uint8}, Case{"int32", DType::int32},
        Case{"float16", DType::float16}, Case{"uint16", DType::bfloat16},
        Case{"float32", DType::float32}, Case{"float64", DType::float64}}) {
    for (const char* version : {"1", "2", "3"}) {
      const std::string path = stem + numpy + version;
      SCOPED_TRACE(path);
      const ArrayFile file(path + ".npy", {}, {dtype});
      EXPECT_EQ(file.dtype(), dtype);
      EXPECT_EQ(file.shape(), (Extents{2, 3, 4}));
      std::string data(24 * size_of(dtype), '#');
      file.read_slice(whole(file.shape()), {data.data(), dtype, file.shape()});
      EXPECT_EQ(data, test::read_bytes(path + ".raw"));
    }
  }
}

TEST_F(NumPy, ReadsWhatWeWrite) {
  const auto group = make_self_group()->shared_control();
  for (const Extents& shape : {Extents{}, Extents{6}, Extents{2, 3}, Extents{0, 4}}) {
    const std::string path = scratch_.file("b.npy");
    std::vector<float> values(static_cast<std::size_t>(shape.product()));
    std::iota(values.begin(), values.end(), 0.5F);
    ArrayWriter writer(*group, path, {{"", DType::float32, shape}});
    writer.write_slice(whole(shape), {values.data(), DType::float32, shape});
    writer.commit();
    std::string tuple = to_string(shape);
    EXPECT_EQ(python("a = np.load('" + path +
                     "')\nassert a.dtype == np.float32\nassert a.shape == "
                     "tuple(" +
                     tuple + ")\nassert (a.ravel() == np.arange(a.size) + 0.5).all()"),
              0)
        << tuple;
  }
}

TEST_F(NumPy, FortranAndBigEndianAreRefused) {
  const std::string path = scratch_.file("c.npy");
  ASSERT_EQ(python("np.save('" + path + "', np.asfortranarray(np.ones((2, 3))))"), 0);
  EXPECT_THROW(ArrayFile{path}, FileError);
  ASSERT_EQ(python("np.save('" + path + "', np.ones(3, '>f4'))"), 0);
  EXPECT_THROW(ArrayFile{path}, FileError);
}

}  // namespace
}  // namespace annulus::files
