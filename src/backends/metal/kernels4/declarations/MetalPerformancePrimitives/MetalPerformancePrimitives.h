// Declarations of the parts of Metal 4's matmul2d that gemm_matmul2d.metal uses, for the type check
// only: written from Apple's documentation, without an implementation. A descriptor converts to a
// number because the checking compiler does not support template arguments of class type.
#ifndef MARLIN_BACKENDS_METAL_KERNELS4_DECLARATIONS_MATMUL2D_H_
#define MARLIN_BACKENDS_METAL_KERNELS4_DECLARATIONS_MATMUL2D_H_

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  constexpr matmul2d_descriptor(int m, int n, int k, bool transpose_left, bool transpose_right,
                                bool relaxed_precision, mode matmul_mode)
      : m_(m + n + k + transpose_left + transpose_right + relaxed_precision + int(matmul_mode)) {}
  constexpr operator int() const { return m_; }

 private:
  int m_;
};

template <int kSimdgroups>
struct execution_simdgroups {};

template <typename Element>
struct cooperative_tensor {
  unsigned short get_capacity() const;
  bool is_valid_element(unsigned short index) const;
  thread Element& operator[](unsigned short index);
  template <typename Tensor>
  void store(thread Tensor& tensor) const;
};

template <int kDescriptor, typename Scope>
struct matmul2d {
  template <typename Left, typename Right, typename Element>
  cooperative_tensor<Element> get_destination_cooperative_tensor() const;
  template <typename Left, typename Right, typename Destination>
  void run(thread Left& left, thread Right& right, thread Destination& destination) const;
};

}  // namespace tensor_ops
}  // namespace mpp

#endif  // MARLIN_BACKENDS_METAL_KERNELS4_DECLARATIONS_MATMUL2D_H_
