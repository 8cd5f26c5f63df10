#include "tokens.hpp"

#include <cstring>

#include "kvpool/core/errors.hpp"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

std::optional<std::uint64_t> read_id(py::handle id) {
    if (id.is_none()) {
        return std::nullopt;
    }
    return py::cast<std::uint64_t>(id);
}

py::object describe_id(const std::optional<std::uint64_t>& id) {
    return id.has_value() ? py::object(py::int_(*id)) : py::object(py::none());
}

std::vector<Digest> read_digests(py::handle digests) {
    std::vector<Digest> out;
    for (const py::handle item : digests) {
        if (PyBytes_Check(item.ptr()) == 0 || PyBytes_GET_SIZE(item.ptr()) != py::ssize_t{sizeof(Digest)}) {
            throw TypeError("digests must be bytes objects of 32 bytes");
        }
        std::memcpy(out.emplace_back().data(), PyBytes_AS_STRING(item.ptr()), sizeof(Digest));
    }
    return out;
}

}  // namespace

ReuseScope read_scope(py::handle pair) {
    if (PyTuple_Check(pair.ptr()) == 0 || PyTuple_GET_SIZE(pair.ptr()) != 2) {
        throw TypeError("scope must be a pair of integers or None");
    }
    return {read_id(PyTuple_GET_ITEM(pair.ptr(), 0)), read_id(PyTuple_GET_ITEM(pair.ptr(), 1))};
}

py::list describe_scope(const ReuseScope& scope) {
    py::list out;
    out.append(describe_id(scope.lora_id));
    out.append(describe_id(scope.salt));
    return out;
}

TokenArguments::TokenArguments(py::handle ids, py::handle digests) {
    if (ids.is_none()) {
        return;
    }
    array_.emplace("tokens", ids, py::dtype::of<std::int32_t>(), 1, false);
    digests_ = read_digests(digests);
}

py::bytes to_bytes(const Digest& digest) { return {reinterpret_cast<const char*>(digest.data()), digest.size()}; }

py::tuple describe_tokens(const std::vector<Token>& ids, const std::vector<Digest>& digests) {
    py::list list;
    for (const Digest& digest : digests) {
        list.append(to_bytes(digest));
    }
    return py::make_tuple(py::array_t<Token>(static_cast<py::ssize_t>(ids.size()), ids.data()), list);
}

py::array describe_keys(const std::vector<BlockKey>& keys) {
    py::array_t<std::uint8_t> out(
        std::vector<py::ssize_t>{static_cast<py::ssize_t>(keys.size()), py::ssize_t{sizeof(BlockKey)}});
    if (!keys.empty()) {
        std::memcpy(out.mutable_data(), keys.data(), keys.size() * sizeof(BlockKey));
    }
    return out;
}

}  // namespace kvpool::bindings
