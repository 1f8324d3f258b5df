// Catch2 2 (Debian 12) and 3 (Debian 13) under one name.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Approx;
#else
#include <catch2/catch.hpp>
#endif

#include "tests/support/seed.hpp"
