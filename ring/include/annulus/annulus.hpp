#pragma once

/// Exact attention over sequences that the ranks of a communicator share.
///
///     annulus::Context context(communicator);                       // ranks, device, transports
///     annulus::Attention attention(context, {.shape = shape, .dtype = annulus::DType::bfloat16});
///     attention.run({query, key, value, output}, stream);           // as often as wanted
///
/// Everything else is reachable from these two classes.
#include <annulus/ring/attention.hpp>
#include <annulus/ring/context.hpp>
#include <annulus/ring/metadata.hpp>
