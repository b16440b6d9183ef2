#include <map>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <annulus/core/error.hpp>
#include <annulus/mesh/launched.hpp>

#include "tests/support/message_of.hpp"

namespace annulus {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

using Environment = std::map<std::string, std::string>;

EnvironmentLookup lookup_in(const Environment& environment) {
  return [&environment](const char* name) {
    const auto found = environment.find(name);
    return found == environment.end() ? nullptr : found->second.c_str();
  };
}

bool started(const Environment& environment) {
  return started_by_launcher(lookup_in(environment));
}

TEST(LauncherDetection, NoLauncherNoMpi) {
  EXPECT_FALSE(started({{"PATH", "/bin"}}));
}

TEST(LauncherDetection, LaunchersThatMpiUnderstands) {
  EXPECT_TRUE(started({{"OMPI_COMM_WORLD_SIZE", "1"}}));
  EXPECT_TRUE(started({{"PMIX_RANK", "0"}}));
  EXPECT_TRUE(started({{"PMI_RANK", "3"}}));
  EXPECT_TRUE(started({{"MV2_COMM_WORLD_RANK", "3"}, {"MV2_COMM_WORLD_SIZE", "4"}}));
  // mpirun inside a Slurm allocation, and srun --mpi=pmix.
  EXPECT_TRUE(
      started({{"OMPI_COMM_WORLD_SIZE", "4"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));
  EXPECT_TRUE(started({{"PMIX_RANK", "1"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}}));
}

TEST(LauncherDetection, SrunWithoutPmiIsAnErrorThatPrintsTheFix) {
  for (const char* variable : {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"}) {
    EXPECT_THAT(
        test::message_of<LibraryError>([&] {
          (void)started({{"SLURM_PROCID", "2"}, {variable, "4"}});
        }),
        AllOf(HasSubstr("4 tasks"), HasSubstr("srun --mpi=pmix"), HasSubstr("mpirun -n 4")));
  }
}

// As Kubernetes' PyTorchJob and many scripts set them; jobs of srun have them besides.
TEST(LauncherDetection, PyTorchsVariablesAloneAreAnErrorThatPrintsTheFix) {
  Environment pytorch{{"MASTER_ADDR", "here"}, {"RANK", "1"}, {"WORLD_SIZE", "4"}};
  EXPECT_THAT(test::message_of<LibraryError>([&] { (void)started(pytorch); }),
              AllOf(HasSubstr("4 processes"), HasSubstr("mpirun -n 4")));
  pytorch["PMIX_RANK"] = "1";
  EXPECT_TRUE(started(pytorch));
  EXPECT_FALSE(started({{"MASTER_ADDR", "here"}, {"RANK", "0"}, {"WORLD_SIZE", "1"}}));
  EXPECT_FALSE(started({{"RANK", "1"}, {"WORLD_SIZE", "4"}}));
}

TEST(LauncherDetection, TorchrunIsAnErrorThatPrintsTheFix) {
  const Environment torchrun{
      {"RANK", "1"},       {"GROUP_RANK", "0"},       {"WORLD_SIZE", "4"},
      {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}, {"MASTER_ADDR", "here"}};
  EXPECT_THAT(test::message_of<LibraryError>([&] { (void)started(torchrun); }),
              AllOf(HasSubstr("torchrun started 4"), HasSubstr("mpirun -n 4")));
  // srun gives every torchrun its variables, and that to all of its processes.
  for (const char* variable : {"PMIX_RANK", "PMI_RANK"}) {
    Environment under_srun{{"TORCHELASTIC_RUN_ID", "none"},
                           {"RANK", "1"},
                           {"WORLD_SIZE", "8"},
                           {variable, "0"},
                           {"SLURM_PROCID", "0"},
                           {"SLURM_STEP_NUM_TASKS", "2"}};
    EXPECT_THAT(test::message_of<LibraryError>([&] { (void)started(under_srun); }),
                AllOf(HasSubstr("torchrun started 8"), HasSubstr("mpirun -n 8")));
  }
  Environment alone = torchrun;
  alone["WORLD_SIZE"] = "1";
  EXPECT_FALSE(started(alone));
  // Variables for PyTorch in a job that mpirun or srun started.
  Environment under_mpirun = torchrun;
  under_mpirun["OMPI_COMM_WORLD_SIZE"] = "4";
  EXPECT_TRUE(started(under_mpirun));
}

void check(int ranks, const Environment& environment) {
  check_connected(ranks, lookup_in(environment));
}

TEST(LauncherDetection, RanksThatMpiLeavesAloneAreAnErrorThatPrintsTheFix) {
  for (const Environment& environment :
       {Environment{{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}},
        Environment{{"MV2_COMM_WORLD_RANK", "1"}, {"MV2_COMM_WORLD_SIZE", "4"}},
        Environment{{"PMI_RANK", "1"}, {"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}}}) {
    EXPECT_NO_THROW(check(4, environment));
    EXPECT_THAT(test::message_of<LibraryError>([&] { check(1, environment); }),
                AllOf(HasSubstr("4 tasks"), HasSubstr("srun --mpi=pmix"), HasSubstr("mpirun")));
  }
}

TEST(LauncherDetection, OneRankOfOneTaskIsConnected) {
  EXPECT_NO_THROW(check(1, {{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}));
  EXPECT_NO_THROW(check(1, {{"MV2_COMM_WORLD_RANK", "0"}, {"MV2_COMM_WORLD_SIZE", "1"}}));
  EXPECT_NO_THROW(
      check(1, {{"PMIX_RANK", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}));
  // mpirun -n 1, whose daemon runs in a Slurm step of several nodes.
  EXPECT_NO_THROW(check(
      1, {{"OMPI_COMM_WORLD_SIZE", "1"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}));
}

TEST(LauncherDetection, OneSlurmTaskStandsAlone) {
  EXPECT_FALSE(started({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}));
  EXPECT_FALSE(started({{"SLURM_PROCID", "0"}}));
  // One task of a larger allocation: the step counts.
  EXPECT_FALSE(
      started({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_STEP_NUM_TASKS", "1"}}));
  // An interactive allocation, outside srun.
  EXPECT_FALSE(started({{"SLURM_NTASKS", "8"}}));
}

TEST(LauncherDetection, ABatchScriptStandsAloneButItsStepsDoNot) {
  const Environment script{{"ENVIRONMENT", "BATCH"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}};
  EXPECT_FALSE(started(script));
  Environment step = script;
  step["SLURM_STEP_NUM_TASKS"] = "8";
  EXPECT_THROW((void)started(step), LibraryError);
}

void expect_number(const Environment& environment, const char* variable, bool of_mpi) {
  const auto process = process_number(lookup_in(environment));
  ASSERT_TRUE(process.has_value()) << variable;
  EXPECT_EQ(std::to_string(process->number), environment.at(variable));
  EXPECT_STREQ(process->variable, variable);
  EXPECT_EQ(process->of_mpi, of_mpi);
}

TEST(LauncherDetection, EveryLauncherNumbersItsProcesses) {
  const Environment slurm{{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}};
  const Environment pytorch{{"MASTER_ADDR", "here"}, {"RANK", "3"}, {"WORLD_SIZE", "4"}};
  const auto with = [](Environment environment, const Environment& more) {
    environment.insert(more.begin(), more.end());
    return environment;
  };
  expect_number(slurm, "SLURM_PROCID", false);
  expect_number(pytorch, "RANK", false);
  expect_number({{"MV2_COMM_WORLD_RANK", "2"}, {"MV2_COMM_WORLD_SIZE", "4"}}, "MV2_COMM_WORLD_RANK",
                true);
  // Among several launchers, the one that started the process itself counts.
  expect_number(with(slurm, {{"PMIX_RANK", "1"}}), "PMIX_RANK", true);
  expect_number(with(slurm, {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}), "PMI_RANK", true);
  expect_number(with(slurm, pytorch), "SLURM_PROCID", false);
  const Environment torchrun = with(pytorch, {{"TORCHELASTIC_RUN_ID", "none"}});
  expect_number(with(slurm, torchrun), "RANK", false);
  expect_number(with(torchrun, {{"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_RANK", "1"}}),
                "OMPI_COMM_WORLD_RANK", true);
}

TEST(LauncherDetection, AProcessThatWasStartedAloneHasNoNumber) {
  for (const Environment& environment :
       {Environment{{"PATH", "/bin"}}, Environment{{"RANK", "1"}, {"WORLD_SIZE", "4"}},
        Environment{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}},
        Environment{{"ENVIRONMENT", "BATCH"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}},
        Environment{{"MASTER_ADDR", "here"}, {"RANK", "first"}, {"WORLD_SIZE", "4"}}}) {
    EXPECT_FALSE(process_number(lookup_in(environment)).has_value());
  }
}

}  // namespace
}  // namespace annulus
