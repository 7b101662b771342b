pub mod communicator;
pub mod declarations;
pub mod profiler;
pub mod runtime;
pub mod tuner;
