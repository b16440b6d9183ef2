#include <cstdio>
#include <memory>

#include <gtest/gtest.h>

#include <annulus/mesh/mpi.hpp>

#include "tests/support/test_world.hpp"

namespace annulus::test {
namespace {

std::unique_ptr<MpiSession> the_session;

}  // namespace

const MpiSession& session() {
  return *the_session;
}

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
  // The worst of all ranks: 2 failed, 1 could run none of its tests, 0 passed.
  const bool failed = RUN_ALL_TESTS() != 0;
  const ::testing::UnitTest& tests = *::testing::UnitTest::GetInstance();
  const bool skipped = tests.skipped_test_count() > 0 && tests.successful_test_count() == 0;
  int worst = failed ? 2 : (skipped ? 1 : 0);
  if (the_session->world() != MPI_COMM_NULL) {
    MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_INT, MPI_MAX, the_session->world());
  }
  the_session.reset();
  // This exit code tells ctest that the program had nothing it could run here; if it ran some
  // tests, GoogleTest lists the skipped ones.
  constexpr int kSkipped = 77;
  return worst == 2 ? 1 : (worst == 1 ? kSkipped : 0);
}
