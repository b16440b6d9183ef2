#include <annulus/mesh/mpi.hpp>

#include <gtest/gtest.h>

#include <cstdio>
#include <memory>

#include "tests/support/test_world.hpp"

namespace annulus::test {
namespace {

std::unique_ptr<MpiSession> the_session;

}  // namespace

const MpiSession& session() { return *the_session; }

}  // namespace annulus::test

int main(int argc, char** argv) {
  using annulus::test::the_session;
  ::testing::InitGoogleTest(&argc, argv);
  the_session = std::make_unique<annulus::MpiSession>(&argc, &argv);
  const int rank = the_session->rank();
  if (rank != 0) {
    // Rank 0 prints the list of tests; the others print failures only.
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    class FailurePrinter final : public ::testing::EmptyTestEventListener {
      void OnTestPartResult(const ::testing::TestPartResult& result) override {
        if (!result.failed()) return;
        std::printf("%s:%d: %s\n", result.file_name() != nullptr ? result.file_name() : "?",
                    result.line_number(), result.message());
      }
    };
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailurePrinter);
  }
  int failed = RUN_ALL_TESTS();
  if (the_session->world() != MPI_COMM_NULL) {
    MPI_Allreduce(MPI_IN_PLACE, &failed, 1, MPI_INT, MPI_MAX, the_session->world());
  }
  the_session.reset();
  return failed;
}
