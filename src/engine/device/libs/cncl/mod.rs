pub mod communicator;
pub mod declarations;
pub mod runtime;
