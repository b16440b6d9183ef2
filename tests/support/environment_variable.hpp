#pragma once

#include <cstdlib>
#include <string>
#include <utility>

namespace annulus::test {

/// Sets an environment variable for the duration of a test.
class EnvironmentVariable {
 public:
  EnvironmentVariable(std::string name, const std::string& value) : name_(std::move(name)) {
    ::setenv(name_.c_str(), value.c_str(), 1);
  }
  ~EnvironmentVariable() { ::unsetenv(name_.c_str()); }
  EnvironmentVariable(const EnvironmentVariable&) = delete;
  EnvironmentVariable& operator=(const EnvironmentVariable&) = delete;

 private:
  std::string name_;
};

}  // namespace annulus::test
