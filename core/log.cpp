#include <cctype>
#include <memory>
#include <string>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <annulus/core/environment.hpp>
#include <annulus/core/log.hpp>

namespace annulus {
namespace {

std::shared_ptr<spdlog::logger> make_logger() {
  auto logger = std::make_shared<spdlog::logger>("annulus",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  std::string level = environment("ANNULUS_LOG_LEVEL");
  for (char& c : level) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  logger->set_level(spdlog::level::from_str(level));  // off for an unknown level
  logger->set_pattern("[annulus %H:%M:%S.%e %l] %v");
  return logger;
}

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> instance = make_logger();
  return *instance;
}

spdlog::level::level_enum level_of(LogLevel level) {
  return level == LogLevel::info ? spdlog::level::info : spdlog::level::debug;
}

}  // namespace

bool logs(LogLevel level) {
  return logger().should_log(level_of(level));
}

void write_log(LogLevel level, std::string_view text) {
  logger().log(level_of(level), text);
}

void set_log_rank(int rank) {
  logger().set_pattern(fmt::format("[annulus %H:%M:%S.%e rank {} %l] %v", rank));
}

}  // namespace annulus
