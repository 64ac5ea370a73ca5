// SPDX-License-Identifier: MIT
// guard/guard_new.cpp traps what it is there for. Only where it is linked and DIFFATTN_GUARD is set.

#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

namespace {

std::string side() {
  const char* const value = std::getenv("DIFFATTN_GUARD");
  return value ? value : "";
}

struct Guard : testing::Test {
  void SetUp() override {
    if (side() != "begin" && side() != "end") GTEST_SKIP() << "DIFFATTN_GUARD is not set";
  }
};

/// Compilers see through a plain function what is wrong here.
template <class T>
T read(const T* p) {
  const volatile T* volatile hidden = p;
  return *hidden;
}

/// The element before a block (begin) or behind it (end) traps; the first and last one do not.
template <class T>
void expect_guarded(const T* block, std::size_t n) {
  read(block), read(block + n - 1);
  const T* const outside = side() == "begin" ? block - 1 : block + n;
  EXPECT_EXIT(read(outside), testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(Guard, ReadOneFloatOutsideOfAVector) {
  for (const std::size_t n : {1u, 2u, 3u, 4u, 13u, 16u, 1000u, 1023u, 1024u, 1025u, 100'000u}) {
    const std::vector<float> x(n);
    expect_guarded(x.data(), n);
  }
}

TEST_F(Guard, ReadOneByteOutside) {
  for (const std::size_t n : {1u, 7u, 4095u, 4096u, 4097u}) {
    const std::vector<unsigned char> x(n);
    expect_guarded(x.data(), n);
  }
}

TEST_F(Guard, WriteOutside) {
  std::vector<double> x(5);
  volatile double* const outside = side() == "begin" ? x.data() - 1 : x.data() + x.size();
  EXPECT_EXIT(*outside = 1, testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(Guard, EveryFormOfNew) {
  const std::unique_ptr<float[]> array(new float[3]()), nothrow(new (std::nothrow) float[3]());
  expect_guarded(array.get(), 3);
  expect_guarded(nothrow.get(), 3);
  struct alignas(64) line {
    float x[16] = {};
  };
  const std::vector<line> lines(3);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(lines.data()) % 64, 0u);
  expect_guarded(lines[0].x, 48);
  void* const nothing = ::operator new(0);
  EXPECT_EXIT(read(static_cast<char*>(nothing)), testing::KilledBySignal(SIGSEGV), "");
  ::operator delete(nothing);
}

TEST_F(Guard, UseAfterDelete) {
  const float* volatile dangling = nullptr;  // volatile: compilers warn
  {
    const std::vector<float> x(13);
    dangling = x.data();
  }
  const std::vector<float> again(13);
  EXPECT_NE(again.data(), dangling);
  EXPECT_EXIT(read<float>(dangling), testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(Guard, AlignmentThatEveryTypeNeeds) {
  for (int i = 0; i < 100; ++i) {
    const std::vector<long double> a(static_cast<std::size_t>(i + 1));
    const std::vector<double> b(static_cast<std::size_t>(i + 1));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data()) % alignof(long double), 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b.data()) % alignof(double), 0u);
  }
}

TEST_F(Guard, FreshMemoryIsNan) {
  const std::unique_ptr<float[]> x(new float[13]);
  for (int i = 0; i < 13; ++i) EXPECT_NE(read(&x[static_cast<std::size_t>(i)]), read(&x[static_cast<std::size_t>(i)]));
}

}  // namespace
