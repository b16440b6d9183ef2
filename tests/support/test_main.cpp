#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <gtest/gtest.h>

#include <annulus/mesh/mpi.hpp>
#include <annulus/mesh/mpi_bootstrap.hpp>

#include "tests/support/file_store.hpp"
#include "tests/support/test_world.hpp"

namespace annulus::test {
namespace {

std::unique_ptr<MpiSession> the_session;

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

}  // namespace

const std::shared_ptr<FileStore>& store() {
  static const std::string folder = variable("ANNULUS_TEST_STORE");
  static const auto the_store = folder.empty() ? nullptr : std::make_shared<FileStore>(folder);
  return the_store;
}

int rank() {
  return store() ? std::stoi(variable("ANNULUS_TEST_RANK")) : session().rank();
}

int size() {
  return store() ? std::stoi(variable("ANNULUS_TEST_SIZE")) : session().size();
}

std::unique_ptr<Bootstrap> bootstrap() {
  return store() ? make_store_bootstrap(store(), rank(), size())
                 : make_mpi_bootstrap(session().world());
}

const MpiSession& session() {
  return *the_session;
}

}  // namespace annulus::test

int main(int argc, char** argv) {
  using annulus::test::the_session;
  ::testing::InitGoogleTest(&argc, argv);
  the_session = std::make_unique<annulus::MpiSession>(&argc, &argv);
  if (annulus::test::rank() != 0) {
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
