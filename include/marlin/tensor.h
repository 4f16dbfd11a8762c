// Non-owning tensor views: element type, shape and strides over a pointer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

#pragma GCC visibility push(default)
namespace marlin {

/// Element type of a tensor, as in safetensors (multi-byte types are little endian).
enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
};

/// Returns the size of one element in bytes; 0 for an invalid enumerator.
int64_t DTypeBytes(DType dtype);

/// Returns the lower-case name used in files and commands: "f32", "bf16", "f16", "u32", ...;
/// "unknown" for an invalid enumerator.
std::string_view DTypeName(DType dtype);

/// The largest rank of a tensor.
inline constexpr int kMaxRank = 8;

/// a * b, or INT64_MAX on overflow: no memory is that large. Precondition: neither is negative.
constexpr int64_t SaturatingProduct(int64_t a, int64_t b) {
  int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

/// A fixed-capacity list of dimensions; rank 0 is a scalar.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims) {
    for (int64_t dim : dims) Append(dim);
  }
  /// Appends a last dimension. Exceeding kMaxRank turns the shape into kMaxRank dimensions of -1,
  /// which every function rejects.
  void Append(int64_t dim) {
    if (rank_ < kMaxRank) {
      dims_[static_cast<size_t>(rank_++)] = dim;
    } else {
      dims_.fill(-1);
    }
  }

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[static_cast<size_t>(i)]; }
  int64_t& operator[](int i) { return dims_[static_cast<size_t>(i)]; }

  /// Product of the dimensions: -1 if one of them is negative, 0 if one of them is 0, INT64_MAX on
  /// overflow.
  int64_t ElementCount() const {
    int64_t count = 1;
    bool none = false;
    for (int i = 0; i < rank_; ++i) {
      const int64_t dim = (*this)[i];
      if (dim < 0) return -1;
      none = none || dim == 0;
      count = SaturatingProduct(count, dim);
    }
    return none ? 0 : count;
  }

  /// "[32, 4096]".
  std::string ToString() const;

  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.rank_ != b.rank_) return false;
    for (int i = 0; i < a.rank_; ++i) {
      if (a[i] != b[i]) return false;
    }
    return true;
  }

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

/// A non-owning strided view of memory. Strides are in elements, not bytes, and arbitrary for a
/// read-only view; the default is C order (last dimension contiguous).
template <typename Pointer>
class BasicTensorView {
 public:
  BasicTensorView() = default;
  BasicTensorView(Pointer data, DType dtype, Shape shape)
      : data_(data), dtype_(dtype), shape_(shape) {
    int64_t stride = 1;
    for (int i = shape.rank() - 1; i >= 0; --i) {
      strides_[static_cast<size_t>(i)] = stride;
      stride = shape[i] < 0 ? -1 : SaturatingProduct(stride < 0 ? 0 : stride, shape[i]);
    }
  }
  /// Strides beyond kMaxRank are ignored.
  BasicTensorView(Pointer data, DType dtype, Shape shape, std::initializer_list<int64_t> strides)
      : data_(data), dtype_(dtype), shape_(shape) {
    size_t i = 0;
    for (int64_t stride : strides) {
      if (i < strides_.size()) strides_[i++] = stride;
    }
  }

  Pointer data() const { return data_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t stride(int i) const { return strides_[static_cast<size_t>(i)]; }
  int64_t ElementCount() const { return shape_.ElementCount(); }
  /// Bytes of the elements, without gaps between strides; -1 and INT64_MAX as for ElementCount.
  int64_t ByteCount() const {
    const int64_t count = ElementCount();
    return count < 0 ? count : SaturatingProduct(count, DTypeBytes(dtype_));
  }
  /// True if the view has no memory; says nothing about the number of elements.
  bool empty() const { return data_ == nullptr; }

  /// True when the elements lie in C order without gaps.
  bool IsContiguous() const {
    int64_t expected = 1;
    for (int i = rank() - 1; i >= 0; --i) {
      if (dim(i) != 1 && stride(i) != expected) return false;
      expected = dim(i) < 0 ? 0 : SaturatingProduct(expected, dim(i));
    }
    return true;
  }

  /// A transposed view of the same matrix. Precondition: rank 2.
  BasicTensorView Transposed() const {
    return BasicTensorView(data_, dtype_, {dim(1), dim(0)}, {stride(1), stride(0)});
  }

  /// The first element as a typed pointer. Precondition: T is the type that dtype() names.
  template <typename T>
  auto As() const {
    if constexpr (std::is_const_v<std::remove_pointer_t<Pointer>>) {
      return static_cast<const T*>(data_);
    } else {
      return static_cast<T*>(data_);
    }
  }

  /// A mutable view converts to a const one.
  operator BasicTensorView<const void*>() const {  // NOLINT(google-explicit-constructor)
    BasicTensorView<const void*> view(data_, dtype_, shape_);
    for (int i = 0; i < rank(); ++i) view.set_stride(i, stride(i));
    return view;
  }
  void set_stride(int i, int64_t stride) { strides_[static_cast<size_t>(i)] = stride; }

 private:
  Pointer data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_;
  std::array<int64_t, kMaxRank> strides_{};
};

using TensorView = BasicTensorView<const void*>;
using MutableTensorView = BasicTensorView<void*>;

}  // namespace marlin
#pragma GCC visibility pop
