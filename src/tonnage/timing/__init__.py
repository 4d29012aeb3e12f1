"""What a step costs in time: sizes of a network, the operations of a step, the rates of a card, the links between."""
