// Errors as values: what went wrong, as one of a few kinds, and the facts of it.
//
// Nothing in the library throws errors of its own; src/ffi alone turns a Status into an exception.
// The name of a kind is the name of a class in Python's lorafleet.core.errors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace lorafleet {

enum class ErrorKind {
  kInvalidInput,
  kInvalidAdapter,
  kNotFound,
  kConflict,
  kExhausted,
  kInternal
};

// The Python class that stands for a kind.
const char* ErrorKindName(ErrorKind kind);

class [[nodiscard]] Error {
 public:
  Error(ErrorKind kind, std::string message) : kind_(kind), message_(std::move(message)) {}

  // Adds a machine-readable part of the message, such as {"tensor", its name}.
  Error&& With(std::string key, std::string value) &&;

  ErrorKind kind() const { return kind_; }
  const std::string& message() const { return message_; }
  const std::vector<std::pair<std::string, std::string>>& facts() const { return facts_; }

 private:
  ErrorKind kind_;
  std::string message_;
  std::vector<std::pair<std::string, std::string>> facts_;
};

// A value or the error that prevented it.
template <typename T>
class [[nodiscard]] Expected {
 public:
  Expected(T value) : held_(std::move(value)) {}      // NOLINT: a value is an Expected
  Expected(Error error) : held_(std::move(error)) {}  // NOLINT: so is an error

  bool ok() const { return held_.index() == 0; }

  // REQUIRES: ok().
  T& value() & { return *std::get_if<0>(&held_); }
  const T& value() const& { return *std::get_if<0>(&held_); }
  T&& value() && { return std::move(*std::get_if<0>(&held_)); }

  // REQUIRES: !ok().
  const Error& error() const { return *std::get_if<1>(&held_); }

 private:
  std::variant<T, Error> held_;
};

// Success without a value, or an error.
class [[nodiscard]] Status : public Expected<std::monostate> {
 public:
  Status() : Expected(std::monostate{}) {}
  Status(Error error) : Expected(std::move(error)) {}  // NOLINT: an error is a Status
};

}  // namespace lorafleet
