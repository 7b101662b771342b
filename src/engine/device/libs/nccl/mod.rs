pub mod communicator;
pub mod profiler;
pub mod runtime;
pub mod tuner;
