// Every exception the native core throws.  bindings/errors.cpp maps each to the class of the same meaning in
// kvpool/errors.py; the tree here has the same shape.
//
// Running out of pages is normally a value; these types are for what the public API raises.  Messages name the field
// or argument and say what is legal.
#pragma once

#include <stdexcept>
#include <string>

namespace kvpool {

// Root of everything below.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A configuration that can not work.
struct ConfigError : Error {
    using Error::Error;
};

// A layer, role or layer group that the configuration does not have.
struct UnknownBufferError : ConfigError {
    using ConfigError::ConfigError;
};

// An argument of the right type but out of its legal range.
struct ArgumentError : Error {
    using Error::Error;
};

// An argument of the wrong type; Python's TypeError.
struct TypeError : Error {
    using Error::Error;
};

// A call that the object's state does not allow.
struct LogicError : Error {
    using Error::Error;
};

// A legal request that this build or device can not serve.
struct UnsupportedError : Error {
    using Error::Error;
};

// Memory of some kind ran out.
struct OutOfMemoryError : Error {
    using Error::Error;
};

// A pool group has not enough free slots now.
struct OutOfPagesError : OutOfMemoryError {
    using OutOfMemoryError::OutOfMemoryError;
};

// More slots than the pool group has in all.
struct NeverFitsError : OutOfPagesError {
    using OutOfPagesError::OutOfPagesError;
};

// Host memory could not be had.
struct HostOomError : OutOfMemoryError {
    using OutOfMemoryError::OutOfMemoryError;
};

// Device memory could not be had.
struct CuOomError : OutOfMemoryError {
    using OutOfMemoryError::OutOfMemoryError;
};

// A driver call failed; `code` is the driver's number.
struct CuError : Error {
    CuError(int error_code, const std::string& message) : Error(message), code(error_code) {}
    int code;
};

// An internal invariant was found broken: the manager must not be used any further.
struct CorruptedError : Error {
    using Error::Error;
};

}  // namespace kvpool
