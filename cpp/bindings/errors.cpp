// Each native exception becomes the class of the same meaning in kvpool.errors, imported when first needed.
#include "kvpool/core/errors.hpp"

#include <pybind11/pybind11.h>

#include <exception>

#include "bindings.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

void raise(const char* name, const Error& error) {
    try {
        py::set_error(py::module_::import("kvpool.errors").attr(name), error.what());
    } catch (py::error_already_set& broken) {  // the package around the extension is not importable
        broken.restore();
    }
}

void raise_driver_error(const CuError& error) {
    try {
        const py::object kind = py::module_::import("kvpool.errors").attr("CuError");
        py::set_error(kind, kind(error.code, error.what()));
    } catch (py::error_already_set& broken) {
        broken.restore();
    }
}

// Most derived first.
void translate(std::exception_ptr pending) {
    try {
        std::rethrow_exception(std::move(pending));
    } catch (const UnknownBufferError& error) {
        raise("UnknownBufferError", error);
    } catch (const ConfigError& error) {
        raise("ConfigError", error);
    } catch (const ArgumentError& error) {
        raise("ArgumentError", error);
    } catch (const TypeError& error) {
        py::set_error(PyExc_TypeError, error.what());
    } catch (const LogicError& error) {
        raise("LogicError", error);
    } catch (const UnsupportedError& error) {
        raise("UnsupportedError", error);
    } catch (const NeverFitsError& error) {
        raise("NeverFitsError", error);
    } catch (const OutOfPagesError& error) {
        raise("OutOfPagesError", error);
    } catch (const HostOomError& error) {
        raise("HostOOMError", error);
    } catch (const CuOomError& error) {
        raise("CuOOMError", error);
    } catch (const OutOfMemoryError& error) {
        raise("OutOfMemoryError", error);
    } catch (const CuError& error) {
        raise_driver_error(error);
    } catch (const CorruptedError& error) {
        raise("CorruptedError", error);
    }
}

}  // namespace

void register_errors() { py::register_local_exception_translator(&translate); }

}  // namespace kvpool::bindings
