#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace annulus {

/// Exit codes of the program. 1 is left to failures of mpirun and the shell.
enum class ExitCode : int {
  success = 0,
  usage = 2,    ///< the caller's input is wrong
  failure = 3,  ///< the job failed while running
  wrong_numbers = 4
};

/// Root of every exception that the library throws.
///
///     Error
///     ├── UserError             the caller's input is wrong; exit code 2
///     │   ├── ArgumentError     one named argument
///     │   ├── FileError         an input file
///     │   ├── UnsupportedError  a valid request that this build or implementation refuses
///     │   └── …                 the spec errors of partition/named_sharding.hpp
///     └── LibraryError          the job cannot continue; exit code 3
///         ├── SystemError       an operating-system call failed
///         ├── TimeoutError      a peer did not answer in time
///         ├── InterruptedError  the process was told to stop while it waited
///         ├── InternalError     a bug of this library
///         └── …                 an MPI call failed
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  [[nodiscard]] virtual ExitCode exit_code() const noexcept = 0;
};

class UserError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] ExitCode exit_code() const noexcept override { return ExitCode::usage; }
};

class LibraryError : public Error {
 public:
  using Error::Error;
  [[nodiscard]] ExitCode exit_code() const noexcept override { return ExitCode::failure; }
};

/// The message is "<argument>: got <value>, expected <expected>".
class ArgumentError : public UserError {
 public:
  ArgumentError(std::string argument, std::string value, std::string expected);
  [[nodiscard]] const std::string& argument() const noexcept { return argument_; }
  [[nodiscard]] const std::string& value() const noexcept { return value_; }
  [[nodiscard]] const std::string& expected() const noexcept { return expected_; }

 private:
  std::string argument_;
  std::string value_;
  std::string expected_;
};

/// An input file that is missing, malformed, or of the wrong dtype or shape.
class FileError : public UserError {
 public:
  FileError(std::string path, const std::string& problem);
  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

/// A well-formed request that this build, implementation or schedule cannot honour.
class UnsupportedError : public UserError {
 public:
  using UserError::UserError;
};

/// An operating-system call failed; the message ends with the text of errno.
class SystemError : public LibraryError {
 public:
  SystemError(const std::string& operation, int error_number);
};

/// No peer made progress for the whole timeout. The message says which step waited for which peer.
class TimeoutError : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

class InternalError : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

/// The process was told to stop, for example by Ctrl-C, while it waited for another rank or a
/// device.
class InterruptedError : public LibraryError {
 public:
  using LibraryError::LibraryError;
};

/// Sets a function that every long wait of the process calls about 50 times a second, on the thread
/// that waits. If it returns a number other than 0, the wait ends with an InterruptedError. Null,
/// the default: nothing is called.
void set_interruption(int (*interrupted)()) noexcept;
[[nodiscard]] bool interrupted();

}  // namespace annulus
